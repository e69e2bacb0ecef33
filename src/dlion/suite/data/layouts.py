"""Layouts of data set folders, for error messages."""

LAYOUTS = {
    "images": "train/CLASS/* and test/CLASS/* (or val), CLASS/* alone, parquet files with pictures"
    " and labels, or MNIST's IDX files (train-images-idx3-ubyte and so on)",
    "imagenet": "train/CLASS/*.JPEG and val/CLASS/*.JPEG, or train-*.parquet and"
    " validation-*.parquet of columns image and label",
    "cifar10": "train-*.parquet and test-*.parquet of columns img and label",
    "cifar100": "train-*.parquet and test-*.parquet of columns img and fine_label",
    "choices": "a folder for each task with its parquet files",
    "prepared_text": "train.bin, val.bin and tokens.json, as `dlion prepare FILE -o"
    " DIR` writes them",
}


def folder_with(dataset: str) -> str:
    """Return a description of a valid ``dataset.path``: "a folder with ..."."""
    return f"a folder with {LAYOUTS.get(dataset, 'the data')}"
