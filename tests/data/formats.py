"""Small data sets and models, written as the real ones lie on a disk."""

import gzip
import io
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image

from dlion.suite.data.torchvision_ops import declare_missing_operators

WORDS = "the cat sat on a mat and saw that dog run far away from big red barn yes no".split()  # noqa: SIM905


def picture(size: int, shade: int, kind: str = "PNG", mode: str = "RGB") -> bytes:
    """Draw a noisy image with pixels from 40 times ``shade`` to 39 more."""
    rng = np.random.default_rng(shade)
    pixels = rng.integers(40 * shade, 40 * shade + 40, (size, size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def photo(number: int, shade: int) -> bytes:
    """Draw a JPEG like ImageNet's: the sizes vary, most are coloured, some grey, some CMYK."""
    return picture(40 + number % 5, shade, "JPEG", ("RGB", "L", "RGB", "CMYK")[number % 4])


def write_cifar(
    folder: Path, classes: int = 10, columns: tuple[str, ...] = ("img", "label"), count: int = 24
) -> None:
    """Write CIFAR in the hub's layout: PNG images of 32 x 32 in parquet."""
    for split, size in (("train", count), ("test", count // 2)):
        _write_images(
            folder / "plain_text", split, columns, classes, size, lambda _, c: picture(32, c % 6)
        )


def write_imagenet_parquet(folder: Path, classes: int = 3, each: int = 8) -> None:
    """Write ImageNet in the hub's layout: JPEG images, classes with names."""
    for split, count in (("train", classes * each), ("validation", 2 * classes)):
        _write_images(folder / "data", split, ("image", "label"), classes, count, photo)


def _write_images(
    folder: Path,
    split: str,
    columns: tuple[str, ...],
    classes: int,
    count: int,
    draw: Callable[[int, int], bytes],
) -> None:
    labels = [i % classes for i in range(count)]
    images = [{"bytes": draw(i, label), "path": f"{i}.jpg"} for i, label in enumerate(labels)]
    names = [f"class {c}" for c in range(classes)]
    features = Features({columns[0]: ImageFeature(), columns[1]: ClassLabel(names=names)})
    folder.mkdir(parents=True, exist_ok=True)
    table = Dataset.from_dict({columns[0]: images, columns[1]: labels}, features=features)
    table.to_parquet(folder / f"{split}-00000-of-00001.parquet")


def write_imagenet_folders(folder: Path, classes: int = 3, each: int = 8) -> None:
    """Write ImageNet in torchvision's layout: split/CLASS/NAME.JPEG."""
    for split, count in (("train", each), ("val", 2)):
        for label in range(classes):
            class_folder = folder / split / f"n{label:08}"
            class_folder.mkdir(parents=True)
            for i in range(count):
                (class_folder / f"{i}.JPEG").write_bytes(photo(i, label))


def as_the_hub_converts(folder: Path) -> None:
    """Rename ``SPLIT-00000-of-00001.parquet`` to ``SPLIT/0000.parquet``, as the hub does."""
    for file in list(folder.rglob("*-of-*.parquet")):
        split_folder = file.parent / file.name.split("-")[0]
        split_folder.mkdir()
        file.rename(split_folder / "0000.parquet")


def write_tokenizer(folder: Path) -> None:
    """Write a word-level tokenizer of transformers."""
    declare_missing_operators()
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "</s>", "Question", "Answer"]
    characters = [chr(c) for c in range(33, 127)]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(special + WORDS + characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>"
    ).save_pretrained(folder)


def write_documents(path: Path, count: int, seed: int = 0) -> list[str]:
    """Write documents as JSON lines, and return their texts."""
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, rng.integers(20, 40))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def write_llama(folder: Path) -> None:
    """Write an untrained LLaMA and its tokenizer as a folder of transformers with safetensors."""
    write_tokenizer(folder)
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(folder)),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


_ANSWERS = ["mat", "dog", "barn", "cat", "red"]
_LETTERED = {"text": _ANSWERS[:4], "label": list("ABCD")}
_COUNTED = {"text": _ANSWERS[:4], "label": list("1234")}
_THREE = {"text": _ANSWERS[:3], "label": list("ABC")}
_FIVE = {"text": _ANSWERS, "label": list("ABCDE")}
ROWS = {  # questions of each task, in the columns of the hub: one question, written in several ways
    "arc_easy": [
        {"id": "1", "question": "the cat sat on a", "choices": answers, "answerKey": key}
        for answers, key in ((_THREE, "A"), (_COUNTED, "1"), (_LETTERED, "A"), (_FIVE, "A"))
    ],
    "arc_challenge": [
        {"id": "2", "question": "from big red", "choices": answers, "answerKey": key}
        for answers, key in ((_FIVE, "C"), (_COUNTED, "3"), (_LETTERED, "C"), (_THREE, "C"))
    ],
    "boolq": [
        {"question": "a cat run far", "passage": "cat -- that cat run far", "idx": 0, "label": 1}
    ],
    "piqa": [{"goal": "saw a barn", "sol1": "run away", "sol2": "sat on a mat", "label": 1}],
    "siqa": [
        {
            "context": "dog saw cat",
            "question": "and cat",
            "answerA": "sat",
            "answerB": "run away",
            "answerC": "mat",
            "label": "2",
        }
    ],
    "hellaswag": [
        {
            "ind": 1,
            "activity_label": "cat",
            "ctx_a": "the cat sat.",
            "ctx_b": "the dog",
            "ctx": "the cat sat. the dog",
            "endings": ["dog", "far", "red", "on a mat"],
            "label": "3",
        },
        {
            "ind": 2,
            "activity_label": "cat",
            "ctx_b": "",
            "ctx_a": "[header] the cat sat [title] The dog",
            "label": "3",
            "ctx": "[header] the cat sat [title] The dog",
            "endings": ["[step] dog", "far", "red", "on a [substeps] mat"],
        },
    ],
    "openbookqa": [
        {"id": "3", "question_stem": "dog run", "choices": _LETTERED, "answerKey": "C"},
    ],
}


def write_tasks(folder: Path, count: int = 12) -> None:
    """Write the seven multiple-choice tasks in the hub's columns, one folder each."""
    for task, rows in ROWS.items():
        test = "test" if task in ("arc_easy", "arc_challenge", "openbookqa") else "validation"
        (folder / task / "plain_text").mkdir(parents=True)
        for split, size in (("train", count), (test, 2)):
            table = Dataset.from_list((rows * size)[:size])
            table.to_parquet(folder / task / "plain_text" / f"{split}-00000-of-00001.parquet")


def write_classes(
    folder: Path, parts: tuple[str, ...] = ("train", "test"), size: int = 16, mode: str = "RGB"
) -> None:
    """Write eight pictures of each of two classes for each part: PART/CLASS/NUMBER.PNG."""
    for part in parts:
        for label, name in enumerate(("cats", "dogs")):
            (folder / part / name).mkdir(parents=True)
            for i in range(8):
                content = picture(size, 3 * label, mode=mode)
                (folder / part / name / f"{i}.PNG").write_bytes(content)


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write unsigned bytes as MNIST's files have them, packed if the name says so."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
        file.write(header + array.astype(np.uint8).tobytes())
