"""Multiple-choice questions, answered by the likelihood a language model gives to each answer.

Trained on as text: a question and its right answer, with the loss on the answer alone and without
solved questions before it. Tested with a few solved training questions before each. Whether the
paper trains with any is not known.

The score is ``acc`` of lm-eval 0.4.13 (github.com/EleutherAI/lm-evaluation-harness; its tasks
arc_easy, arc_challenge, boolq, piqa, social_iqa, hellaswag and openbookqa): the answer of the
greatest log-likelihood wins, whatever its length (``acc_norm`` would divide by the characters).
Prompts, answers, blank lines between solved questions, splits and the hub's data sets are the same
as there; which training questions are solved is drawn otherwise.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from dlion.data.base import Batch, Text, split_off
from dlion.data.parquet import load_hub, load_parquet
from dlion.data.text import library_sources
from dlion.data.tokens import load_tokenizer
from dlion.errors import UserError
from dlion.streams import stream

IGNORED = -100  # label of what does not count


class Question(NamedTuple):
    """A prompt, the answers to choose from, and which is right."""

    task: str
    prompt: str
    answers: list[str]
    right: int


class Task(NamedTuple):
    """Where questions are (a data set of the hub, its configuration) and how a row is read."""

    hub: str
    config: str | None
    test: str
    columns: set[str]
    read: Callable[[dict[str, Any]], tuple[str, list[str], int]]


def _right_letter(row: dict[str, Any]) -> tuple[list[str], int]:
    answers = row["choices"]
    return answers["text"], answers["label"].index(row["answerKey"].strip())


def _arc(row: dict[str, Any]) -> tuple[str, list[str], int]:
    return f"Question: {row['question']}\nAnswer:", *_right_letter(row)


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
    return _unmarked(prompt), [_unmarked(end) for end in row["endings"]], int(row["label"])


def _unmarked(text: str) -> str:
    """Without the marks that HellaSwag has from WikiHow: [header], [title], [step], [substeps]."""
    text = text.strip().replace(" [title]", ". ")  # what is before a title is one, too
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _openbookqa(row: dict[str, Any]) -> tuple[str, list[str], int]:
    return row["question_stem"], *_right_letter(row)


TASKS = {
    "arc_easy": Task(
        "allenai/ai2_arc", "ARC-Easy", "test", {"question", "choices", "answerKey"}, _arc
    ),
    "arc_challenge": Task(
        "allenai/ai2_arc", "ARC-Challenge", "test", {"question", "choices", "answerKey"}, _arc
    ),
    # passages begin with their titles, which google/boolq leaves out
    "boolq": Task(
        "aps/super_glue", "boolq", "validation", {"question", "passage", "label"}, _boolq
    ),
    "piqa": Task("baber/piqa", None, "validation", {"goal", "sol1", "sol2", "label"}, _piqa),
    "siqa": Task(
        "lighteval/siqa", None, "validation",
        {"context", "question", "answerA", "answerB", "answerC", "label"}, _siqa,
    ),
    "hellaswag": Task(
        "Rowan/hellaswag", None, "validation",
        {"activity_label", "ctx_a", "ctx_b", "endings", "label"}, _hellaswag,
    ),
    "openbookqa": Task(
        "allenai/openbookqa", "main", "test", {"question_stem", "choices", "answerKey"},
        _openbookqa,
    ),
}  # fmt: skip


@dataclass
class MultipleChoice(Text):
    """Questions as tokens.

    Attributes:
        train, test: questions.
        tokenizer: of transformers, or what looks like one.
        context: tokens a model sees at once; what is longer loses its beginning.
        shots: solved training questions of the same task before each question of the test.
        seed: of the choice of those.
    """

    train: Sequence[Question]
    test: Sequence[Question]
    tokenizer: Any
    context: int
    shots: int = 3
    seed: int = 0

    test_batch_size = 2

    def __post_init__(self) -> None:
        self.vocabulary = len(self.tokenizer)
        self.tasks = sorted({question.task for question in self.test})
        self.sums = 2 + 2 * len(self.tasks)
        self._solved: dict[str, list[Question]] = {}
        for question in self.train:
            self._solved.setdefault(question.task, []).append(question)

    @property
    def train_size(self) -> int:
        return len(self.train)

    @property
    def test_size(self) -> int:
        return len(self.test)

    def batch(self, indices: Tensor, generator: torch.Generator, device: str = "cpu") -> Batch:
        chosen = [self.train[i] for i in indices.tolist()]
        return self._rows([self._encode(q.prompt, q.answers[q.right]) for q in chosen], device)

    def test_batch(self, start: int, stop: int, device: str = "cpu") -> Batch:
        rows = []
        for i in range(start, min(stop, self.test_size)):
            question = self.test[i]
            prompt = self._examples(i, question.task) + question.prompt
            rows += [self._encode(prompt, answer) for answer in question.answers]
        return self._rows(rows, device)

    def hold_out(self, fraction: float = 0.1, seed: int = 0) -> Self:
        train, test = split_off(self.train_size, fraction, seed)
        return replace(
            self,
            train=[self.train[i] for i in train.tolist()],
            test=[self.train[i] for i in test.tolist()],
        )

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """The mean over questions of the mean over an answer's tokens."""
        return (self._surprise(logits, y) / (y != IGNORED).sum(-1)).mean()

    def score(self, logits: Tensor, y: Tensor, start: int) -> Tensor:
        """Loss of the right answers and their tokens; then, a task each, right and asked."""
        surprise = self._surprise(logits, y).double()
        sums, row, place = torch.zeros(self.sums, dtype=torch.float64), 0, start
        while row < len(y):
            question = self.test[place]
            answers = surprise[row : row + len(question.answers)]
            right = row + question.right
            sums[0] += surprise[right].item()
            sums[1] += (y[right] != IGNORED).sum().item()
            task = 2 + 2 * self.tasks.index(question.task)
            sums[task] += float(answers.argmin().item() == question.right)
            sums[task + 1] += 1
            row, place = row + len(question.answers), place + 1
        return sums

    def results(self, sums: list[float]) -> dict[str, float]:
        accuracies = {
            f"accuracy_{task}": sums[2 + 2 * i] / sums[3 + 2 * i]
            for i, task in enumerate(self.tasks)
        }
        mean = sum(accuracies.values()) / len(accuracies)
        return {"test_loss": sums[0] / sums[1], "test_accuracy": mean, **accuracies}

    @staticmethod
    def _surprise(logits: Tensor, y: Tensor) -> Tensor:
        """Minus the log-likelihood of each answer, ``[rows]``."""
        losses = F.cross_entropy(logits.flatten(0, -2).float(), y.flatten(), reduction="none")
        return losses.view(y.shape).sum(-1)

    def _examples(self, place: int, task: str) -> str:
        """Solved questions to put before question ``place`` of the test."""
        pool = self._solved.get(task, [])
        draw = torch.randperm(len(pool), generator=stream(self.seed, "shots", place))
        solved = [pool[i] for i in draw[: self.shots].tolist()]
        return "".join(f"{q.prompt} {q.answers[q.right]}\n\n" for q in solved)

    def _encode(self, prompt: str, answer: str) -> tuple[list[int], int]:
        """Tokens of both, the last ``context + 1``, and how many of them are the prompt's."""
        ids = self.tokenizer(f"{prompt} {answer}")["input_ids"]
        asked = len(self.tokenizer(prompt.rstrip(" "))["input_ids"])  # tokens begin with spaces
        asked = min(asked, len(ids) - 1)
        cut = max(len(ids) - self.context - 1, 0)
        return ids[cut:], max(asked - cut, 1)

    def _rows(self, rows: list[tuple[list[int], int]], device: str) -> Batch:
        longest = max(len(ids) for ids, _ in rows) - 1
        x = torch.zeros(len(rows), longest, dtype=torch.int64)
        y = torch.full_like(x, IGNORED)
        for row, (ids, asked) in enumerate(rows):
            whole = torch.tensor(ids)
            x[row, : len(ids) - 1] = whole[:-1]  # what follows the answer is not looked at
            y[row, asked - 1 : len(ids) - 1] = whole[asked:]
        return x.to(device), y.to(device)


def choices(
    tokenizer: str | None,
    tasks: Sequence[str] = tuple(TASKS),
    path: str | None = None,
    context: int = 1024,
    shots: int = 3,
) -> MultipleChoice:
    """The multiple-choice tasks of arXiv 2404.00438, section 5.2, together.

    Args:
        tokenizer: a folder, or a name of the hub; the model's.
        tasks: some of :data:`TASKS`.
        path: a folder with a folder for each task that holds the parquet files of its data set in
            :data:`TASKS`; None: the hub.

    Raises:
        UserError: if a task is unknown or cannot be found.
    """
    if tokenizer is None:
        raise UserError(
            "a pretrained model brings the tokenizer: type model.path=DIR, or dataset.tokenizer=DIR"
        )
    parts: dict[str, list[Question]] = {"train": [], "test": []}
    for name in tasks:
        if name not in TASKS:
            raise UserError(f"dataset.tasks={name} is unknown: choose from {', '.join(TASKS)}")
        task = TASKS[name]
        if path is None:
            tables = load_hub(task.hub, task.columns, task.config)
        else:
            splits = {"train": "train", task.test: task.test}
            tables = load_parquet(Path(path).expanduser() / name, splits, task.columns)
        for part, split in (("train", "train"), ("test", task.test)):
            parts[part] += [Question(name, *task.read(row)) for row in tables[split]]
    return MultipleChoice(**parts, tokenizer=load_tokenizer(tokenizer, "dataset.tokenizer"),
                          context=context, shots=shots)  # fmt: skip


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def __len__(self) -> int:
        return 256


def next_line(
    context: int = 256, shots: int = 1, train: int = 4000, test: int = 200
) -> MultipleChoice:
    """Which line of the standard library comes next? Four to choose from, on every machine."""
    parts: list[list[Question]] = []
    for part, (sources, wanted) in enumerate(zip(library_sources(), (train, test), strict=True)):
        lines = b"".join(sources).decode(errors="replace").splitlines()
        lines = [line.strip() for line in lines if 20 <= len(line.strip()) <= 60]
        coins = stream(0, "next line", part)
        places = torch.randint(2, len(lines), (wanted,), generator=coins).tolist()
        others = torch.randint(len(lines), (wanted, 3), generator=coins).tolist()
        rights = torch.randint(4, (wanted,), generator=coins).tolist()
        questions = []
        for place, wrong, right in zip(places, others, rights, strict=True):
            answers = [lines[i] for i in wrong]
            answers.insert(right, lines[place])
            prompt = "\n".join(lines[place - 2 : place]) + "\n"
            questions.append(Question("next_line", prompt, answers, right))
        parts.append(questions)
    return MultipleChoice(*parts, tokenizer=Bytes(), context=context, shots=shots)
