"""The seven multiple-choice tasks of arXiv 2404.00438, section 5.2.

Prompts, answers, splits and the hub's data sets are those of lm-eval 0.4.13
(github.com/EleutherAI/lm-evaluation-harness; its tasks arc_easy, arc_challenge, boolq, piqa,
social_iqa, hellaswag and openbookqa).
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlion.errors import UserError
from dlion.suite.data.multiple_choice import MultipleChoice, Question
from dlion.suite.data.parquet import load_hub, load_parquet
from dlion.suite.data.tokenizers import load_tokenizer
from dlion.values import Count, Folder, Name, Whole


class Task(NamedTuple):
    """The source of a task's questions.

    Attributes:
        hub: the data set's name on the hub.
        config: its configuration there; None: it has only one.
        test: the split that is tested on.
        columns: those that ``read`` needs.
        read: turns a row into the prompt, the answers, and the number of the right one.
    """

    hub: str
    config: str | None
    test: str
    columns: set[str]
    read: Callable[[dict[str, Any]], tuple[str, list[str], int]]


def _answers_and_key(row: dict[str, Any]) -> tuple[list[str], int]:
    """Return the answers of a row that names the right one by its letter."""
    answers = row["choices"]
    return answers["text"], answers["label"].index(row["answerKey"].strip())


def _arc(row: dict[str, Any]) -> tuple[str, list[str], int]:
    return f"Question: {row['question']}\nAnswer:", *_answers_and_key(row)


def _boolq(row: dict[str, Any]) -> tuple[str, list[str], int]:
    prompt = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
    return prompt, ["no", "yes"], int(row["label"])


def _piqa(row: dict[str, Any]) -> tuple[str, list[str], int]:
    return f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], int(row["label"])


def _siqa(row: dict[str, Any]) -> tuple[str, list[str], int]:
    answers = [row["answerA"], row["answerB"], row["answerC"]]
    return f"Q: {row['context']} {row['question']}\nA:", answers, int(row["label"]) - 1


def _hellaswag(row: dict[str, Any]) -> tuple[str, list[str], int]:
    prompt = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    endings = [_without_marks(ending) for ending in row["endings"]]
    return _without_marks(prompt), endings, int(row["label"])


def _without_marks(text: str) -> str:
    """Remove WikiHow's marks from HellaSwag's text: [header], [title], [step], [substeps]."""
    text = text.strip().replace(" [title]", ". ")  # a title ends a sentence
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _openbookqa(row: dict[str, Any]) -> tuple[str, list[str], int]:
    return row["question_stem"], *_answers_and_key(row)


TASKS = {
    "arc_easy": Task(
        hub="allenai/ai2_arc",
        config="ARC-Easy",
        test="test",
        columns={"question", "choices", "answerKey"},
        read=_arc,
    ),
    "arc_challenge": Task(
        hub="allenai/ai2_arc",
        config="ARC-Challenge",
        test="test",
        columns={"question", "choices", "answerKey"},
        read=_arc,
    ),
    "boolq": Task(
        hub="aps/super_glue",  # its passages begin with their titles, which google/boolq leaves out
        config="boolq",
        test="validation",
        columns={"question", "passage", "label"},
        read=_boolq,
    ),
    "piqa": Task(
        hub="baber/piqa",
        config=None,
        test="validation",
        columns={"goal", "sol1", "sol2", "label"},
        read=_piqa,
    ),
    "siqa": Task(
        hub="lighteval/siqa",
        config=None,
        test="validation",
        columns={"context", "question", "answerA", "answerB", "answerC", "label"},
        read=_siqa,
    ),
    "hellaswag": Task(
        hub="Rowan/hellaswag",
        config=None,
        test="validation",
        columns={"activity_label", "ctx_a", "ctx_b", "endings", "label"},
        read=_hellaswag,
    ),
    "openbookqa": Task(
        hub="allenai/openbookqa",
        config="main",
        test="test",
        columns={"question_stem", "choices", "answerKey"},
        read=_openbookqa,
    ),
}


def choices(
    tokenizer: Name | None,
    tasks: Sequence[str] = tuple(TASKS),
    path: Folder | None = None,
    context: Count = 1024,
    shots: Whole = 3,
) -> MultipleChoice:
    """Load several tasks as one data set.

    Args:
        tokenizer: the model's: a folder, or a name of the hub.
        tasks: some of :data:`TASKS`.
        path: a folder with a folder for each task that holds the parquet files of its data set in
            :data:`TASKS`; None: the hub.
        context: tokens a model sees at once.
        shots: solved training questions before each question of the test.

    Raises:
        UserError: if a task is unknown or cannot be found.
    """
    if tokenizer is None:
        raise UserError(
            "a pretrained model brings the tokenizer: type model.path=DIR, or dataset.tokenizer=DIR"
        )
    for name in tasks:
        if name not in TASKS:
            raise UserError(f"dataset.tasks={name} is unknown: choose from {', '.join(TASKS)}")
    reader = load_tokenizer(tokenizer, "model.path or dataset.tokenizer")
    train: list[Question] = []
    test: list[Question] = []
    for name in tasks:
        task = TASKS[name]
        tables = _load_tables(name, task, path)
        train += [Question(name, *task.read(row)) for row in tables["train"]]
        test += [Question(name, *task.read(row)) for row in tables[task.test]]
    return MultipleChoice(train, test, reader, context=context, shots=shots)


def _load_tables(name: str, task: Task, path: str | None) -> dict[str, Any]:
    """Return a task's tables by split."""
    if path is None:
        return load_hub(task.hub, task.columns, task.config)
    splits = {"train": "train", task.test: task.test}
    return load_parquet(Path(path).expanduser() / name, splits, task.columns)
