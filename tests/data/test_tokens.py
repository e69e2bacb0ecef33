"""Text that is prepared once: every document arrives, whatever interrupts."""

import bz2
import csv
import gzip
import io
import json
import lzma
import shutil
import signal

import numpy as np
import pytest
from datasets import Dataset

from dlion.errors import UserError
from dlion.suite.arguments import errors_end_the_command
from dlion.suite.data import prepared_text
from dlion.suite.data.prepare import Texts, main, prepare
from dlion.suite.data.tokenizers import load_tokenizer
from tests.conftest import ROOT
from tests.data.formats import write_documents, write_tokenizer
from tests.support.runs import Run, until


@pytest.fixture
def tokenizer(tmp_path):
    write_tokenizer(tmp_path / "tokenizer")
    return load_tokenizer(str(tmp_path / "tokenizer"), "--tokenizer")


class Failing(Texts):
    """Documents of which only the first 2,000 can be had, as before a power cut."""

    def __getitem__(self, part):
        if part.stop > 2000:
            raise KeyboardInterrupt
        return super().__getitem__(part)


def say(capsys, *arguments):
    """Return the exit code and what the command prints, in this process."""
    try:
        with errors_end_the_command():
            main([*map(str, arguments)])
        code = 0
    except SystemExit as left:
        code = left.code
    printed = capsys.readouterr()
    return code, (printed.err if code else printed.out).splitlines()[-1]


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
    assert f"dataset.path={tmp_path / 'out'}" in done.stdout.splitlines()[-1]
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
    prepare(Texts(texts), tokenizer, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        prepare(Failing(texts), tokenizer, tmp_path / "cut", origin="a.jsonl")
    with pytest.raises(
        UserError, match=r"holds 2,000 of 2,500 documents: resume .* a.jsonl --held-out 10"
    ):
        prepared_text(str(tmp_path / "cut"))
    with (tmp_path / "cut" / "train.bin").open("ab") as file:
        file.write(b"written after the last count")
    with pytest.raises(UserError, match=r"was begun with of=2500, now it is 2400"):
        prepare(Texts(texts[:2400]), tokenizer, tmp_path / "cut", origin="a.jsonl")
    with pytest.raises(UserError, match=r"was begun with origin=a.jsonl, now it is b.jsonl"):
        prepare(Texts(texts), tokenizer, tmp_path / "cut", origin="b.jsonl")
    shutil.copytree(tmp_path / "cut", tmp_path / "short")
    (tmp_path / "short" / "train.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"train.bin holds 0 tokens, but tokens.json says"):
        prepare(Texts(texts), tokenizer, tmp_path / "short", origin="a.jsonl")
    prepare(Texts(texts), tokenizer, tmp_path / "cut", origin="a.jsonl")
    for part in ("train.bin", "val.bin"):
        assert (tmp_path / "cut" / part).read_bytes() == (tmp_path / "whole" / part).read_bytes()


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(tmp_path, tokenizer):
    texts = write_documents(tmp_path / "a.jsonl", 10_000)
    prepare(Texts(texts), tokenizer, tmp_path / "whole")
    arguments = ["./a.jsonl", "-o", tmp_path / "out", "--tokenizer", tmp_path / "tokenizer"]
    interrupted = start(*arguments, cwd=tmp_path)
    until((tmp_path / "out" / "tokens.json").exists)
    interrupted.send_signal(signal.SIGINT)
    done = interrupted.wait()
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.endswith("interrupted: type the same command again to resume\n")
    assert json.loads((tmp_path / "out" / "tokens.json").read_text())["documents"] < 10_000
    arguments[0] = tmp_path / "a.jsonl"  # another way to type it
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    for part in ("train.bin", "val.bin"):
        assert (tmp_path / "out" / part).read_bytes() == (tmp_path / "whole" / part).read_bytes()


def test_what_cannot_go_on_says_what_to_do(tmp_path, tokenizer):
    texts = write_documents(tmp_path / "a.jsonl", 50)
    prepare(Texts(texts), tokenizer, tmp_path / "out")
    (tmp_path / "out" / "train.bin").unlink()
    with pytest.raises(UserError, match=r"train.bin holds 0 tokens, .*: delete the folder"):
        prepare(Texts(texts), tokenizer, tmp_path / "out")
    (tmp_path / "out" / "tokens.json").write_text('{"documents": ')
    with pytest.raises(UserError, match=r"tokens.json is damaged: copy it again, or delete"):
        prepare(Texts(texts), tokenizer, tmp_path / "out")
    with pytest.raises(UserError, match=r"document 51, .* no text in the column text but null"):
        prepare(Texts([*texts, None]), tokenizer, tmp_path / "new")
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"--tokenizer has no end-of-text token"):
        prepare(Texts(texts), tokenizer, tmp_path / "new")


def test_wrong_input_is_one_clear_line(tmp_path, tokenizer, capsys):
    write_documents(tmp_path / "a.jsonl", 3)
    (tmp_path / "latin1.txt").write_bytes("für".encode("latin1"))
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "tiny.txt").write_text("hello")
    (tmp_path / "missing.jsonl").write_text('{"text": "a cat"}\n{"texts": "a dog"}\n')
    (tmp_path / "cut.jsonl").write_text('{"text": "a cat"}\n{"text": ')
    known = ["-o", tmp_path / "out", "--tokenizer", tmp_path / "tokenizer"]
    for arguments, sentence in (
        ([tmp_path / "a.jsonl", *known, "--held-out", 1], "give 2 or more"),
        ([tmp_path / "a.jsonl", *known, "--separator", "x"], "--separator=x cuts text files only"),
        ([tmp_path / "latin1.txt", *known], "latin1.txt is not text in UTF-8 (byte 1)"),
        ([tmp_path / "empty.txt", *known], "empty.txt holds no text"),
        ([tmp_path / "tiny.txt", "-o", tmp_path / "tiny"], "too little: prepare more text"),
        ([tmp_path / "a.jsonl", tmp_path / "tiny.txt", *known], "give files of one kind"),
        ([tmp_path / "a.jsonl", *known, "--split", "test"], "--split=test is for the hub"),
        ([tmp_path / "a.jsonl", *known, "--held-out", "1e308"], "is not a whole number"),
        ([tmp_path / "a.jsonl", *known, "--column", "words"], "is not a column: choose text"),
        (
            [tmp_path / "a.jsonl", "-o", tmp_path / "out", "--tokenizer", tmp_path],
            "give the folder",
        ),
        ([tmp_path / "a.jsonl", tmp_path / "b.jsonl", *known], "b.jsonl is not a file"),
        ([tmp_path / "tokenizer" / "tokenizer.json", tmp_path / "a.jsonl", *known], "same columns"),
        ([tmp_path / "missing.jsonl", *known], "document 2, counted from 1, has no text"),
        ([tmp_path / "cut.jsonl", *known], "cut.jsonl could not be read (JSON parse error"),
        ([tmp_path / "a.jsonl", *known, "-o", tmp_path / "a.jsonl"], "is a file: give a folder"),
    ):
        code, last = say(capsys, *arguments)
        assert code == 2 and last.startswith("error: ") and sentence in last


def test_a_text_file_keeps_every_byte_and_says_how_to_train_on_it(tmp_path, capsys):
    text = "".join(f"Line {i}, für each\r\n\n\tand more.\n" for i in range(1000))
    (tmp_path / "book.txt").write_bytes(text.encode())
    code, last = say(capsys, tmp_path / "book.txt", "-o", tmp_path / "out")
    assert code == 0
    program, script, *settings = last.split()
    assert (program, script) == ("python", "train.py")
    typed = dict(setting.split("=") for setting in settings)
    data = prepared_text(typed["dataset.path"], int(typed["dataset.context"]))
    train, test = data.train_tokens.tolist(), data.test_tokens.tolist()
    assert bytes(train[:-1] + test[:-1]) == text.encode() and train[-1] == test[-1] == 256
    assert 0.09 < len(test) / len(text.encode()) < 0.11
    assert data.train_size >= 256 and data.test_size >= 10  # eight workers have a batch


def test_documents_of_a_text_file_are_cut_at_a_marker(tmp_path, capsys):
    documents = [f"document {i}\nof two lines" for i in range(200)]
    (tmp_path / "all.txt").write_text("<|end|>".join(documents))
    arguments = [tmp_path / "all.txt", "-o", tmp_path / "out", "--separator", "<|end|>"]
    assert say(capsys, *arguments)[0] == 0
    data = prepared_text(str(tmp_path / "out"), context=8)
    for tokens, chosen in (
        (data.train_tokens, [d for i, d in enumerate(documents) if i % 10]),
        (data.test_tokens, documents[::10]),
    ):
        assert tokens.tolist() == [b for text in chosen for b in [*text.encode(), 256]]


def test_files_of_others_are_not_replaced_and_a_text_that_changed_is_noticed(tmp_path, capsys):
    book, out = tmp_path / "book.txt", tmp_path / "out"
    book.write_text("a")
    assert say(capsys, book, "-o", out)[0] == 2 and not out.exists()  # too little
    book.write_text("abc " * 1000)
    out.mkdir()
    (out / "train.bin").write_bytes(b"another's")
    code, last = say(capsys, book, "-o", out)
    assert code == 2 and "train.bin is there already, without tokens.json" in last
    assert (out / "train.bin").read_bytes() == b"another's"
    (out / "train.bin").unlink()
    assert say(capsys, book, "-o", out)[0] == 0
    with pytest.raises(UserError, match=rf"is a file: type dataset.path={out}$"):
        prepared_text(str(out / "train.bin"))
    book.write_text("abc " * 1001)
    code, last = say(capsys, book, "-o", out)
    assert code == 2 and "was made of 4000 bytes of text, of which there are 4004 now" in last
    code, last = say(capsys, book, "-o", tmp_path / "new", "--separator", "<|end|>")
    assert code == 2 and "stands between no documents" in last and not (tmp_path / "new").exists()


def test_a_short_text_still_has_a_test_of_some_size(tmp_path):
    prepare(Texts(["abc " * 1000]), load_tokenizer("bytes", ""), tmp_path)
    data = prepared_text(str(tmp_path), context=1024)
    assert data.train_size == 2 and data.test_size == 1


def test_files_that_do_not_fit_are_named(tmp_path, tokenizer):
    with pytest.raises(UserError, match=r"must be prepared: type `dlion prepare"):
        prepared_text(None)
    with pytest.raises(UserError, match=r"has no tokens.json"):
        prepared_text(str(tmp_path))
    (tmp_path / "book.txt").write_text("text")
    with pytest.raises(UserError, match=r"book.txt is a file: type .*prepare .*book.txt -o DIR"):
        prepared_text(str(tmp_path / "book.txt"))
    prepare(Texts(write_documents(tmp_path / "a.jsonl", 50)), tokenizer, tmp_path, held_out=5)
    with pytest.raises(UserError, match=r"tokens, .* type dataset.context=\d+ or less"):
        prepared_text(str(tmp_path), context=4096)
    facts = json.loads((tmp_path / "tokens.json").read_text())
    assert facts["dtype"] == "uint16" and facts["documents"] == 50
    whole = np.fromfile(tmp_path / "train.bin", np.uint16)
    whole[:-3].tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match=r"but tokens.json says .*: copy it again"):
        prepared_text(str(tmp_path), context=16)


def test_compressed_files_and_tables_hold_the_same_documents(tmp_path, tokenizer):
    texts = [f"document {i}, with a comma" for i in range(20)]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    table = io.StringIO()
    csv.writer(table).writerows([["text"], *([text] for text in texts)])
    content = {
        "a.jsonl": rows.encode(),
        "b.ndjson": rows.encode(),
        "c.jsonl.gz": gzip.compress(rows.encode()),
        "d.jsonl.bz2": bz2.compress(rows.encode()),
        "e.jsonl.xz": lzma.compress(rows.encode()),
        "f.csv": table.getvalue().encode(),
        "g.tsv": ("text\n" + "".join(text + "\n" for text in texts)).encode(),
        "h.csv": ("id;text\n" + "".join(f"1;{text}\n" for text in texts)).encode(),
    }
    prepared = set()
    Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")
    for name, data in [*content.items(), ("saved", b"")]:
        if data:
            (tmp_path / name).write_bytes(data)
        out = tmp_path / f"{name}.out"
        main([str(tmp_path / name), "-o", str(out), "--tokenizer", str(tmp_path / "tokenizer")])
        prepared.add(tuple((out / part).read_bytes() for part in ("train.bin", "val.bin")))
    assert len(prepared) == 1


@pytest.mark.parametrize("largest", [123, 70_023])
def test_a_tokenizer_may_leave_numbers_out_and_end_documents_itself(tmp_path, capsys, largest):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    numbers = {"<unk>": 0, "the": 7, "cat": 9, "</s>": largest}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", largest)]
    )
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>"
    ).save_pretrained(folder)
    write_documents(tmp_path / "a.jsonl", 60)
    out = tmp_path / "out"
    code, last = say(capsys, tmp_path / "a.jsonl", "-o", out, "--tokenizer", folder)
    assert code == 0 and "python train.py dataset=prepared_text" in last
    data = prepared_text(str(out), 8)
    assert data.vocabulary == largest + 1
    ends = (data.train_tokens == largest).nonzero().flatten()
    assert len(ends) > 40 and (ends.diff() > 1).all()  # one behind each document


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("dog ".encode("utf-16") * 999, ""),
        ("dog ".encode("utf-32") * 999, ""),
        (b"\xef\xbb\xbf" + b"dog " * 999, ""),
        (b"dog \xe9" * 99, "is not text in UTF-8 (byte 4): convert it, with `iconv -f latin1"),
        (b"%PDF-1.4 \xe2\xe3\x01\x02" * 99, "is not text, but binary"),
        (b"PK\x03\x04\0\0" * 99, "is not text, but binary"),
    ],
)
def test_what_a_text_file_may_be(tmp_path, capsys, content, told):
    (tmp_path / "a.txt").write_bytes(content)
    code, last = say(capsys, tmp_path / "a.txt", "-o", tmp_path / "out")
    assert told in last and code == 2 * bool(told)
    if not told:
        assert bytes(prepared_text(str(tmp_path / "out"), 8).train_tokens[:4].tolist()) == b"dog "


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_tables_in_utf_16_are_to_be_converted(tmp_path, capsys, name):
    (tmp_path / name).write_bytes("text\n".encode("utf-16"))
    code, last = say(capsys, tmp_path / name, "-o", tmp_path / "o")
    assert code == 2 and "`iconv -f utf-16 -t utf-8`" in last
