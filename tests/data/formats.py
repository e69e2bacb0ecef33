"""Small data sets and models, written as the real ones lie on a disk."""

import io
import json
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, Features, Value
from datasets import Image as ImageFeature
from PIL import Image

from dlion.torchvision_ops import declare_missing_operators

WORDS = "the cat sat on a mat and saw that dog run far away from big red barn yes no".split()  # noqa: SIM905


def picture(size: int, shade: int, kind: str = "PNG") -> bytes:
    """A noisy image whose brightness is its class's."""
    rng = np.random.default_rng(shade)
    pixels = rng.integers(40 * shade, 40 * shade + 40, (size, size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def write_cifar(
    folder: Path, classes: int = 10, columns: tuple[str, ...] = ("img", "label"), count: int = 24
) -> None:
    """The hub's layout of CIFAR: PNG images of 32 x 32 in parquet."""
    for split, size in (("train", count), ("test", count // 2)):
        _write_images(folder / "plain_text", split, columns, classes, size, 32, "PNG")


def write_imagenet_parquet(folder: Path, classes: int = 3, each: int = 8) -> None:
    """The hub's layout of ImageNet: JPEG images of any size, classes with names."""
    for split, count in (("train", classes * each), ("validation", 2 * classes)):
        _write_images(folder / "data", split, ("image", "label"), classes, count, 40, "JPEG")


def _write_images(
    folder: Path,
    split: str,
    columns: tuple[str, ...],
    classes: int,
    count: int,
    size: int,
    kind: str,
) -> None:
    labels = [i % classes for i in range(count)]
    images = [
        {"bytes": picture(size + i % 3 * (kind == "JPEG"), label % 6, kind), "path": f"{i}.jpg"}
        for i, label in enumerate(labels)
    ]
    names = [f"class {c}" for c in range(classes)]
    features = Features({columns[0]: ImageFeature(), columns[1]: ClassLabel(names=names)})
    folder.mkdir(parents=True, exist_ok=True)
    table = Dataset.from_dict({columns[0]: images, columns[1]: labels}, features=features)
    table.to_parquet(folder / f"{split}-00000-of-00001.parquet")


def write_imagenet_folders(folder: Path, classes: int = 3, each: int = 8) -> None:
    """torchvision's layout of ImageNet: split/CLASS/NAME.JPEG."""
    for split, count in (("train", each), ("val", 2)):
        for label in range(classes):
            place = folder / split / f"n{label:08}"
            place.mkdir(parents=True)
            for i in range(count):
                (place / f"{i}.JPEG").write_bytes(picture(40 + i, label, "JPEG"))


def write_tokenizer(folder: Path) -> None:
    """A word-level tokenizer of transformers."""
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
    """Documents as JSON lines; returns their texts."""
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, rng.integers(20, 40))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def write_llama(folder: Path) -> None:
    """An untrained LLaMA with its tokenizer, as a folder of transformers with safetensors."""
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


_LETTERED = {"text": ["mat", "dog", "barn", "cat"], "label": ["A", "B", "C", "D"]}
ROWS = {  # a question of each task, in the columns of the hub
    "arc_easy": {
        "id": "1", "question": "the cat sat on a", "choices": _LETTERED, "answerKey": "A",
    },
    "arc_challenge": {
        "id": "2", "question": "from big red", "choices": _LETTERED, "answerKey": "C",
    },
    "boolq": {"question": "a cat run far", "answer": True, "passage": "that cat run far away"},
    "piqa": {"goal": "saw a barn", "sol1": "run away", "sol2": "sat on a mat", "label": 1},
    "siqa": {
        "context": "dog saw cat", "question": "and cat", "answerA": "sat", "answerB": "run away",
        "answerC": "mat", "label": "2",
    },
    "hellaswag": {
        "ind": 1, "activity_label": "cat", "ctx": "the cat sat", "label": "3",
        "endings": ["dog", "far", "red", "on a mat"],
    },
    "openbookqa": {
        "id": "3", "question_stem": "dog run", "choices": _LETTERED, "answerKey": "C",
    },
}  # fmt: skip


def write_tasks(folder: Path, count: int = 12) -> None:
    """The seven multiple-choice tasks in the hub's columns, one folder each."""
    for task, row in ROWS.items():
        test = "test" if task in ("arc_easy", "arc_challenge", "openbookqa") else "validation"
        (folder / task).mkdir(parents=True)
        for split, rows in (("train", count), (test, 2)):
            table = Dataset.from_list(rows * [row])
            if "answer" in row:
                table = table.cast_column("answer", Value("bool"))
            table.to_parquet(folder / task / f"{split}-00000-of-00001.parquet")
