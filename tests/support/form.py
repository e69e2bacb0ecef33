"""Measure how a page is written: python -m tests.support.form PAGE ... prints a row for each."""

import re
import sys
from pathlib import Path
from typing import NamedTuple


class Form(NamedTuple):
    """What makes a page hard to read.

    Attributes:
        mean_words: words per sentence.
        longest_sentence: its words.
        longest_row: characters of the longest row of a table.
        words_to_code: words before the first block of code; all, where there is none.
    """

    mean_words: float
    longest_sentence: int
    longest_row: int
    words_to_code: int


def form_of(text: str) -> Form:
    """Measure a page of Markdown. A title, an item and a paragraph end a sentence."""
    before, _, _ = text.partition("\n```")
    rows = [len(line) for line in text.splitlines() if line.startswith("|")]
    lengths = [len(_words(sentence)) for sentence in _sentences(text)]
    lengths = [length for length in lengths if length] or [0]
    first = sum(len(_words(sentence)) for sentence in _sentences(before, tables=True))
    mean = sum(lengths) / len(lengths)
    return Form(round(mean, 1), max(lengths), max(rows, default=0), first)


def _sentences(text: str, tables: bool = False) -> list[str]:
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.M | re.S)
    text = re.sub(r"(?<=\n\n)( {4}.*\n)+", "\n", text)  # code that is indented, not fenced
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\$\$.*?\$\$$", "", text, flags=re.M | re.S)
    text = re.sub(r"`[^`]*`|\$[^$\n]*\$", "code", text)
    if not tables:
        text = re.sub(r"^ *\|.*$", "", text, flags=re.M)
        text = re.sub(r"^#.*$", "", text, flags=re.M)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=#)", text)
    return [part for block in blocks for part in re.split(r"(?<=[.!?])[\")*]*\s+", block)]


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_][\w'.,/-]*", text)


if __name__ == "__main__":
    print(f"{'page':<44}", *Form._fields)
    for name in sys.argv[1:]:
        print(f"{name:<44}", *form_of(Path(name).read_text()))
