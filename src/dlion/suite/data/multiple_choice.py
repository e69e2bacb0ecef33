"""Multiple-choice questions, answered by the likelihood a language model gives to each answer.

Training takes a question and its right answer as text, with the loss on the answer alone. In a
test, a few solved training questions precede each question. Whether arXiv 2404.00438 trains with
solved questions as well is not known.

The score is ``acc`` of lm-eval 0.4.13: the answer of the greatest log-likelihood wins, whatever its
length (``acc_norm`` would divide by the characters). Solved questions are separated by blank lines
as there, but drawn otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from dlion.streams import stream
from dlion.suite.data.base import Batch, Text, split_off, to_device
from dlion.suite.data.inputs import TextInput
from dlion.suite.data.tokenizers import vocabulary_of

IGNORED = -100  # the label of tokens that do not count


class Question(NamedTuple):
    """A prompt, the answers to choose from, and the number of the right one."""

    task: str
    prompt: str
    answers: list[str]
    right: int


@dataclass
class MultipleChoice(Text):
    """Questions as tokens.

    Attributes:
        train, test: questions.
        tokenizer: one of transformers, or an object that is called in the same way.
        context: tokens a model sees at once; a longer text loses its beginning.
        shots: solved training questions of the same task before each question of the test.
        seed: decides which questions these are.
    """

    train: Sequence[Question]
    test: Sequence[Question]
    tokenizer: Any
    context: int
    shots: int = 3
    seed: int = 0

    test_batch_size = 2

    def __post_init__(self) -> None:
        self.vocabulary = vocabulary_of(self.tokenizer)
        self.tasks = sorted({question.task for question in self.test})
        self.sums = 2 + 2 * len(self.tasks)
        self._train_by_task: dict[str, list[Question]] = {}
        for question in self.train:
            self._train_by_task.setdefault(question.task, []).append(question)

    @property
    def input(self) -> TextInput:
        return TextInput(self.tokenizer, self.context)

    @property
    def train_size(self) -> int:
        return len(self.train)

    @property
    def test_size(self) -> int:
        return len(self.test)

    def batch(self, indices: Tensor, generator: torch.Generator, device: str = "cpu") -> Batch:
        questions = [self.train[i] for i in indices.tolist()]
        rows = [self._encode(q.prompt, q.answers[q.right]) for q in questions]
        return self._batch_of(rows, device)

    def test_batch(self, start: int, stop: int, device: str = "cpu") -> Batch:
        rows = []
        for index in range(start, min(stop, self.test_size)):
            question = self.test[index]
            prompt = self._solved_questions(index) + question.prompt
            rows += [self._encode(prompt, answer) for answer in question.answers]
        return self._batch_of(rows, device)

    def hold_out(self, fraction: float = 0.1, seed: int = 0) -> Self:
        train, test = split_off(self.train_size, fraction, seed)
        return replace(
            self,
            train=[self.train[i] for i in train.tolist()],
            test=[self.train[i] for i in test.tolist()],
        )

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean over questions of the mean over an answer's tokens."""
        return (self._surprise(logits, y) / (y != IGNORED).sum(-1)).mean()

    def score(self, logits: Tensor, y: Tensor, start: int) -> Tensor:
        """Sum over the questions of a test batch.

        Returns:
            The loss of the right answers, the number of their tokens, and for each task the number
            of questions answered rightly and the number of all, float64 ``[2 + 2 tasks]``.
        """
        surprise = self._surprise(logits, y).double().cpu()
        lengths = (y != IGNORED).sum(-1).cpu()
        sums = torch.zeros(self.sums, dtype=torch.float64)
        row, index = 0, start
        while row < len(y):
            question = self.test[index]
            answers = surprise[row : row + len(question.answers)]
            right = row + question.right
            sums[0] += surprise[right].item()
            sums[1] += lengths[right].item()
            task = 2 + 2 * self.tasks.index(question.task)
            sums[task] += float(answers.argmin().item() == question.right)
            sums[task + 1] += 1
            row, index = row + len(question.answers), index + 1
        return sums

    def results(self, sums: list[float]) -> dict[str, float]:
        accuracies = {
            f"accuracy_{task}": sums[2 + 2 * i] / sums[3 + 2 * i]
            for i, task in enumerate(self.tasks)
            if sums[3 + 2 * i]  # an evaluation in part may ask none of a task
        }
        mean = sum(accuracies.values()) / len(accuracies)
        return {"test_loss": sums[0] / sums[1], "test_accuracy": mean, **accuracies}

    @staticmethod
    def _surprise(logits: Tensor, y: Tensor) -> Tensor:
        """Return minus the log-likelihood of each answer, ``[rows]``."""
        losses = F.cross_entropy(logits.flatten(0, -2).float(), y.flatten(), reduction="none")
        return losses.view(y.shape).sum(-1)

    def _solved_questions(self, index: int) -> str:
        """Return the text of solved questions to put before question ``index`` of the test."""
        candidates = self._train_by_task.get(self.test[index].task, [])
        order = torch.randperm(len(candidates), generator=stream(self.seed, "shots", index))
        solved = [candidates[i] for i in order[: self.shots].tolist()]
        return "".join(f"{q.prompt} {q.answers[q.right]}\n\n" for q in solved)

    def _encode(self, prompt: str, answer: str) -> tuple[list[int], int]:
        """Return the last ``context + 1`` tokens of both, and how many belong to the prompt."""
        ids = self.tokenizer(f"{prompt} {answer}")["input_ids"]
        # a tokenizer may begin tokens with spaces: one at the end would belong to the answer
        prompt_length = len(self.tokenizer(prompt.rstrip(" "))["input_ids"])
        prompt_length = min(prompt_length, len(ids) - 1)
        cut = max(len(ids) - self.context - 1, 0)
        return ids[cut:], max(prompt_length - cut, 1)

    def _batch_of(self, rows: list[tuple[list[int], int]], device: str) -> Batch:
        """Pad what :meth:`_encode` returned to one length; only answers are labelled."""
        longest = max(len(ids) for ids, _ in rows) - 1
        x = torch.zeros(len(rows), longest, dtype=torch.int64)
        y = torch.full_like(x, IGNORED)
        for row, (ids, prompt_length) in enumerate(rows):
            tokens = torch.tensor(ids)
            x[row, : len(ids) - 1] = tokens[:-1]  # the model is causal: padding is not seen
            y[row, prompt_length - 1 : len(ids) - 1] = tokens[prompt_length:]
        return to_device(x, device), to_device(y, device)
