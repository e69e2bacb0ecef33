"""A multiple-choice task for every machine, made of the running Python's standard library."""

import torch

from dlion.streams import stream
from dlion.suite.data.multiple_choice import MultipleChoice, Question
from dlion.suite.data.text import library_sources
from dlion.values import Count, Whole


class ByteTokenizer:
    """A tokenizer whose tokens are bytes."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def __len__(self) -> int:
        return 256


def next_line(
    context: Count = 256, shots: Whole = 1, train: Count = 4000, test: Count = 200
) -> MultipleChoice:
    """Ask which of four lines of the standard library follows two others.

    Args:
        context: bytes a model sees at once.
        shots: solved training questions before each question of the test.
        train, test: how many questions to draw from the files of each part.
    """
    train_files, test_files = library_sources()
    return MultipleChoice(
        _questions(train_files, train, part=0),
        _questions(test_files, test, part=1),
        ByteTokenizer(),
        context=context,
        shots=shots,
    )


def _questions(files: list[bytes], count: int, part: int) -> list[Question]:
    """Draw questions from files; ``part`` numbers the random stream."""
    lines = [line.strip() for line in b"".join(files).decode(errors="replace").splitlines()]
    lines = [line for line in lines if 20 <= len(line) <= 60]
    generator = stream(0, "next line", part)
    right_lines = torch.randint(2, len(lines), (count,), generator=generator).tolist()
    wrong_lines = torch.randint(len(lines), (count, 3), generator=generator).tolist()
    positions = torch.randint(4, (count,), generator=generator).tolist()
    questions = []
    for right, wrong, position in zip(right_lines, wrong_lines, positions, strict=True):
        answers = [lines[i] for i in wrong]
        answers.insert(position, lines[right])
        prompt = "\n".join(lines[right - 2 : right]) + "\n"
        questions.append(Question("next_line", prompt, answers, position))
    return questions
