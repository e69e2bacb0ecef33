"""Multiple choice: the right answer is trained on, and the likeliest answer wins."""

import pytest
import torch

from dlion.errors import UserError
from dlion.suite.data import choices, next_line
from dlion.suite.data.choices import TASKS
from dlion.suite.data.multiple_choice import IGNORED, MultipleChoice, Question
from dlion.suite.data.next_line import ByteTokenizer
from tests.data.formats import ROWS, as_the_hub_converts, write_tasks, write_tokenizer

RIGHT = {  # what lm-eval 0.4.13 makes of the same rows
    "arc_easy": ("Question: the cat sat on a\nAnswer:", "mat"),
    "arc_challenge": ("Question: from big red\nAnswer:", "barn"),
    "boolq": ("cat -- that cat run far\nQuestion: a cat run far?\nAnswer:", "yes"),
    "piqa": ("Question: saw a barn\nAnswer:", "sat on a mat"),
    "siqa": ("Q: dog saw cat and cat\nA:", "run away"),
    "hellaswag": ("cat: the cat sat. The dog", "on a mat"),
    "openbookqa": ("dog run", "barn"),
}


@pytest.fixture
def data(tmp_path):
    write_tokenizer(tmp_path / "model")
    write_tasks(tmp_path / "tasks")
    as_the_hub_converts(tmp_path / "tasks" / "piqa")
    return choices(str(tmp_path / "model"), path=str(tmp_path / "tasks"), shots=1, context=64)


def test_every_task_is_read(data):
    assert set(RIGHT) == set(TASKS) == set(ROWS)
    assert (data.train_size, data.test_size) == (84, 14)
    for question in data.train:
        prompt, answer = RIGHT[question.task]
        assert question.prompt == prompt and question.answers[question.right] == answer
    assert {len(question.answers) for question in data.test} == {2, 3, 4, 5}
    assert not any("[" in answer for question in data.train for answer in question.answers)


def test_only_the_right_answer_is_trained_on(data):
    x, y = data.batch(torch.arange(0, 84, 12), torch.Generator())
    for row, target, question in zip(x, y, data.train[::12], strict=True):
        prompt, answer = RIGHT[question.task]
        answered = target != IGNORED
        assert data.tokenizer.decode(target[answered]) == answer
        last = int(answered.nonzero()[-1])
        whole = data.tokenizer(f"{prompt} {answer}")["input_ids"]
        assert row[: last + 1].tolist() == whole[:-1]


def test_parts_of_a_batch_weigh_as_their_questions_do(data):
    indices = torch.arange(0, 84, 7)
    x, y = data.batch(indices, torch.Generator())
    logits = torch.randn(*y.shape, data.vocabulary, generator=torch.Generator().manual_seed(0))
    whole = data.loss(logits, y)
    parts = [data.loss(logits[part], y[part]) for part in torch.arange(12).split([2, 7, 3])]
    weighted = sum(loss * size / 12 for loss, size in zip(parts, (2, 7, 3), strict=True))
    assert torch.allclose(whole, weighted) and len(x) == 12


@pytest.mark.parametrize("knows", [True, False])
def test_the_likeliest_answer_wins(data, knows):
    """An oracle gives the tokens of the right answers a high likelihood, or a low one."""
    total = torch.zeros(data.sums, dtype=torch.float64)
    for start in range(0, data.test_size, data.test_batch_size):
        _, y = data.test_batch(start, start + data.test_batch_size)
        row = 0
        logits = torch.zeros(*y.shape, data.vocabulary)
        for question in data.test[start : start + data.test_batch_size]:
            right = row + question.right
            for position in (y[right] != IGNORED).nonzero().flatten():
                logits[right, position, y[right, position]] = 20.0 if knows else -20.0
            row += len(question.answers)
        assert row == len(y)
        total += data.score(logits, y, start)
    results = data.results(total.tolist())
    assert all(results[f"accuracy_{task}"] == knows for task in TASKS)
    assert results["test_accuracy"] == knows and (results["test_loss"] < 1) == knows


def test_a_solved_question_stands_before_each(data):
    x, _ = data.test_batch(0, 1)
    words = data.tokenizer.decode(x[0]).split()
    solved = "Question : the cat sat on a Answer : mat"
    assert words[:10] == solved.split() and words.count("Question") == 2


def test_a_long_prompt_loses_its_beginning(data):
    data.context = 6
    x, y = data.test_batch(0, 2)
    assert x.shape[1] == 6 and (y != IGNORED).any(1).all()


def test_a_space_at_the_end_of_a_prompt_is_the_answers():
    """As in lm-eval, for tokenizers that put spaces before words."""
    question = Question("t", "the cat ", ["sat"], 0)
    data = MultipleChoice([question], [question], ByteTokenizer(), context=64, shots=0)
    _, y = data.test_batch(0, 1)
    assert bytes(y[y != IGNORED].tolist()) == b"  sat"


def test_next_line_is_there_on_every_machine():
    data = next_line(train=50, test=20)
    assert (data.train_size, data.test_size, data.vocabulary) == (50, 20, 256)
    question = data.test[0]
    assert len(set(question.answers)) == 4 and question.prompt.endswith("\n")
    _x, y = data.batch(torch.arange(4), torch.Generator())
    assert bytes(y[0][y[0] != IGNORED].tolist()).decode().strip() in data.train[0].answers
    held = data.hold_out()
    assert (held.train_size, held.test_size) == (45, 5)


def test_wrong_tasks_are_named(tmp_path):
    with pytest.raises(UserError, match=r"type model.path=DIR, or dataset.tokenizer=DIR"):
        choices(None)
    with pytest.raises(UserError, match=r"dataset.tasks=arc is unknown: choose from arc_easy"):
        choices("x", tasks=["arc"])
    with pytest.raises(UserError, match=r"model.path or dataset.tokenizer=.* is neither a folder"):
        choices(str(tmp_path))
    write_tokenizer(tmp_path / "model")
    with pytest.raises(UserError, match=r"piqa is not a folder"):
        choices(str(tmp_path / "model"), tasks=["piqa"], path=str(tmp_path))
