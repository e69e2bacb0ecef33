"""Text that is prepared once: every document arrives, whatever interrupts."""

import json
import shutil
import signal
import time

import numpy as np
import pytest

from dlion.data import prepared_text
from dlion.data.prepare import main, prepare
from dlion.data.tokens import load_tokenizer
from dlion.errors import UserError
from tests.conftest import ROOT
from tests.data.formats import write_documents, write_tokenizer
from tests.runs import Run


@pytest.fixture
def tokenizer(tmp_path):
    write_tokenizer(tmp_path / "tokenizer")
    return load_tokenizer(str(tmp_path / "tokenizer"), "--tokenizer")


class Table:
    """Documents; asking for more than ``until`` fails, as a power cut would."""

    def __init__(self, texts, until=None):
        self.texts, self.until = texts, until

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, part):
        if self.until is not None and part.stop > self.until:
            raise KeyboardInterrupt
        return {"text": self.texts[part]}


def run(*arguments, cwd=ROOT):
    return start(*arguments, cwd=cwd).wait()


def start(*arguments, cwd=ROOT):
    return Run(["-m", "dlion", "prepare", *map(str, arguments)], cwd=cwd)


@pytest.mark.slow
def test_every_document_arrives(tmp_path, tokenizer):
    texts = write_documents(tmp_path / "a.jsonl", 30) + write_documents(tmp_path / "b.jsonl", 25, 1)
    done = run(
        tmp_path / "a.jsonl",
        tmp_path / "b.jsonl",
        "-o",
        tmp_path / "out",
        "--tokenizer",
        tmp_path / "tokenizer",
        "--held-out",
        10,
    )
    assert done.returncode == 0, done.stderr
    assert f"type dataset.path={tmp_path / 'out'}" in done.stdout
    data = prepared_text(str(tmp_path / "out"), context=16)
    assert data.vocabulary == len(tokenizer)
    for tokens, chosen in (
        (data.test_tokens, [t for i, t in enumerate(texts) if i % 10 == 0]),
        (data.train_tokens, [t for i, t in enumerate(texts) if i % 10]),
    ):
        words = tokenizer.decode(tokens.tolist()).split(tokenizer.eos_token)
        assert [part.strip() for part in words[:-1]] == chosen and words[-1] == ""
    x, y = next(iter(data.test_batches([0])))
    assert x.shape[1] == 16 and x[0, 1] == y[0, 0]


def test_stopped_half_way_it_goes_on(tmp_path, tokenizer):
    texts = write_documents(tmp_path / "a.jsonl", 2500)
    prepare(Table(texts), tokenizer, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        prepare(Table(texts, until=2000), tokenizer, tmp_path / "cut", origin="a.jsonl")
    with pytest.raises(
        UserError, match=r"holds 2,000 of 2,500 documents: go on .* a.jsonl --held-out 2000"
    ):
        prepared_text(str(tmp_path / "cut"))
    with (tmp_path / "cut" / "train.bin").open("ab") as file:
        file.write(b"written after the last count")
    with pytest.raises(UserError, match=r"was begun with of=2500, now it is 2400"):
        prepare(Table(texts[:2400]), tokenizer, tmp_path / "cut", origin="a.jsonl")
    with pytest.raises(UserError, match=r"was begun with origin=a.jsonl, now it is b.jsonl"):
        prepare(Table(texts), tokenizer, tmp_path / "cut", origin="b.jsonl")
    shutil.copytree(tmp_path / "cut", tmp_path / "short")
    (tmp_path / "short" / "train.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"train.bin holds 0 tokens, but tokens.json says"):
        prepare(Table(texts), tokenizer, tmp_path / "short", origin="a.jsonl")
    prepare(Table(texts), tokenizer, tmp_path / "cut", origin="a.jsonl")
    for part in ("train.bin", "val.bin"):
        assert (tmp_path / "cut" / part).read_bytes() == (tmp_path / "whole" / part).read_bytes()


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(tmp_path, tokenizer):
    texts = write_documents(tmp_path / "a.jsonl", 10_000)
    prepare(Table(texts), tokenizer, tmp_path / "whole")
    arguments = ["./a.jsonl", "-o", tmp_path / "out", "--tokenizer", tmp_path / "tokenizer"]
    interrupted = start(*arguments, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "out" / "tokens.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    interrupted.send_signal(signal.SIGINT)
    done = interrupted.wait()
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.endswith("interrupted: type the same command again to go on\n")
    assert json.loads((tmp_path / "out" / "tokens.json").read_text())["documents"] < 10_000
    arguments[0] = tmp_path / "a.jsonl"  # another way to type it
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    for part in ("train.bin", "val.bin"):
        assert (tmp_path / "out" / part).read_bytes() == (tmp_path / "whole" / part).read_bytes()


def test_what_cannot_go_on_says_what_to_do(tmp_path, tokenizer):
    texts = write_documents(tmp_path / "a.jsonl", 50)
    prepare(Table(texts), tokenizer, tmp_path / "out")
    (tmp_path / "out" / "train.bin").unlink()
    with pytest.raises(UserError, match=r"train.bin holds 0 tokens, .*: delete the folder"):
        prepare(Table(texts), tokenizer, tmp_path / "out")
    (tmp_path / "out" / "tokens.json").write_text('{"documents": ')
    with pytest.raises(UserError, match=r"tokens.json is damaged: copy it again, or delete"):
        prepare(Table(texts), tokenizer, tmp_path / "out")
    with pytest.raises(UserError, match=r"document 51, .* no text in the column text but null"):
        prepare(Table([*texts, None]), tokenizer, tmp_path / "new")
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"--tokenizer has no end-of-text token"):
        prepare(Table(texts), tokenizer, tmp_path / "new")


def test_wrong_input_is_one_clear_line(tmp_path, tokenizer):
    write_documents(tmp_path / "a.jsonl", 3)
    (tmp_path / "missing.jsonl").write_text('{"text": "a cat"}\n{"texts": "a dog"}\n')
    (tmp_path / "cut.jsonl").write_text('{"text": "a cat"}\n{"text": ')
    known = ["-o", tmp_path / "out", "--tokenizer", tmp_path / "tokenizer"]
    for arguments, sentence in (
        ([tmp_path / "a.jsonl", *known, "--held-out", 1], "give 2 or more"),
        ([tmp_path / "a.jsonl", *known, "--column", "words"], "there are text only"),
        (
            [tmp_path / "a.jsonl", "-o", tmp_path / "out", "--tokenizer", tmp_path],
            "give the folder",
        ),
        ([tmp_path / "a.jsonl", tmp_path / "b.jsonl", *known], "b.jsonl is not a file"),
        ([tmp_path / "tokenizer" / "tokenizer.json", tmp_path / "a.jsonl", *known], "same columns"),
        ([tmp_path / "missing.jsonl", *known], "document 2, counted from 1, has no text"),
        ([tmp_path / "cut.jsonl", *known], "cut.jsonl cannot be read (JSON parse error"),
        ([tmp_path / "a.jsonl", *known, "-o", tmp_path / "a.jsonl"], "is a file: give a folder"),
    ):
        with pytest.raises(UserError) as refused:
            main([*map(str, arguments)])
        assert sentence in str(refused.value)


def test_files_that_do_not_fit_are_named(tmp_path, tokenizer):
    with pytest.raises(UserError, match=r"must be prepared: type `dlion prepare"):
        prepared_text(None)
    with pytest.raises(UserError, match=r"has no tokens.json"):
        prepared_text(str(tmp_path))
    prepare(Table(write_documents(tmp_path / "a.jsonl", 50)), tokenizer, tmp_path, held_out=5)
    with pytest.raises(UserError, match=r"give a smaller context"):
        prepared_text(str(tmp_path), context=4096)
    facts = json.loads((tmp_path / "tokens.json").read_text())
    assert facts["dtype"] == "uint16" and facts["documents"] == 50
    whole = np.fromfile(tmp_path / "train.bin", np.uint16)
    whole[:-3].tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match=r"but tokens.json says .*: copy it again"):
        prepared_text(str(tmp_path), context=16)
