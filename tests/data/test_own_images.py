"""Anybody's pictures: every usual layout is read, and what is wrong is named in one sentence."""

import io
import struct
import unicodedata
import zlib

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, load_dataset
from datasets import Image as ImageFeature
from omegaconf import OmegaConf
from PIL import Image, ImageCms

from dlion.errors import TrainingFailed, UserError
from dlion.suite.data import ImageData, imagenet, images, load
from dlion.suite.data.inputs import TextInput
from dlion.suite.data.pictures import read_picture
from dlion.suite.data.tokenizers import Bytes
from tests.data.formats import (
    picture,
    write_cifar,
    write_classes,
    write_idx,
    write_imagenet_folders,
)


def bomb(side: int = 30_000) -> bytes:
    """Make a PNG of 900 million pixels in about 100 kB."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"x") + chunk(b"IEND", b"")


@pytest.mark.parametrize("test_name", ["test", "val", "validation"])
def test_folders_of_classes(tmp_path, test_name):
    write_classes(tmp_path, ("train", test_name))
    (tmp_path / "train" / "cats" / ".DS_Store").write_bytes(b"not a picture")
    (tmp_path / "train" / ".cache").mkdir()
    data = images(str(tmp_path))
    assert (data.train_size, data.test_size, data.classes) == (16, 16, 2)
    assert data.train_x.shape == (16, 3, 16, 16) and data.test_y.tolist() == 8 * [0] + 8 * [1]
    first = np.asarray(Image.open(tmp_path / "train" / "cats" / "0.PNG"))
    assert torch.equal(data.train_x[0], torch.from_numpy(first.copy()).permute(2, 0, 1))


def test_folders_without_a_test_part_lose_a_tenth_to_it(tmp_path):
    write_classes(tmp_path / "a", ("",))
    write_classes(tmp_path / "b", ("train",))
    one, two = images(str(tmp_path / "a")), images(str(tmp_path / "b"))
    assert (one.train_size, one.test_size, one.classes) == (14, 2, 2)
    assert torch.equal(one.train_x, two.train_x) and torch.equal(one.test_y, two.test_y)


def test_grey_pictures_have_one_channel_unless_others_have_colour(tmp_path):
    write_classes(tmp_path, ("train",), mode="L")
    assert images(str(tmp_path)).channels == 1
    write_classes(tmp_path, ("test",))
    data = images(str(tmp_path))
    assert data.train_x.shape[1] == data.test_x.shape[1] == 3
    assert torch.equal(data.train_x[:, 0], data.train_x[:, 2])


def test_pictures_that_differ_are_cut_and_scaled_when_asked_for(tmp_path):
    write_classes(tmp_path)
    Image.new("RGB", (40, 16)).save(tmp_path / "train" / "dogs" / "wide.png")
    with pytest.raises(UserError, match=r"wide.png has 40 x 16 pixels, .* dataset.image_size=16"):
        images(str(tmp_path))
    assert images(str(tmp_path), image_size=12).train_x.shape == (17, 3, 12, 12)


def test_pictures_of_16_bits_keep_their_shades(tmp_path):
    shades = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    for i in range(20):
        (tmp_path / f"{i % 2}").mkdir(exist_ok=True)
        Image.fromarray(shades[:: 1 - 2 * (i % 2)]).save(tmp_path / f"{i % 2}" / f"{i}.png")
    data = images(str(tmp_path))
    for x, y in zip(data.train_x[:, 0], data.train_y.tolist(), strict=True):
        assert x.tolist() == (shades[:: 1 - 2 * y] // 256).tolist()


ramp = np.arange(256).reshape(16, 16)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ((ramp + 2000).astype(np.uint16), "PNG"),  # of 12 bits, faint
        (ramp.astype(np.uint16), "TIFF"),
        ((ramp * 1000).astype(np.int32), "TIFF"),
        ((ramp / 255).astype(np.float32), "TIFF"),
    ],
)
def test_many_bits_are_read_by_their_range(values, kind):
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, kind)
    read = np.asarray(read_picture(buffer.getvalue(), "it", keep_grey=True))
    assert np.abs(read.astype(int) - ramp).max() <= 1 and len(np.unique(read)) > 250


def test_scans_of_a_set_share_one_range_of_grey(tmp_path):
    """A dark scan of 12 bits stays darker than a bright one, in a model's input as well."""
    for part, number in ((part, i) for part in ("train", "val") for i in range(4)):
        folder = tmp_path / part / f"{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        values = ramp.astype(np.uint16) + 3000 * (number % 2)
        Image.fromarray(values).save(folder / f"{number}.png")
    data = images(str(tmp_path))
    shades = [data.train_x[data.train_y == label].float().mean().item() for label in (0, 1)]
    assert shades[0] < 20 and shades[1] > 235 and tuple(data.levels) == (0, 3255)
    dark = data.input.pixels(tmp_path / "val" / "0" / "0.png")
    assert torch.equal(dark, data.test_x[0])
    lazy = imagenet(str(tmp_path), 16, loaders=0)
    x, y = lazy.test_batch(0, 4)
    assert tuple(lazy.input.levels) == (0, 3255) and x[y == 0].max() < x[y == 1].min()
    assert images(str(tmp_path), levels=[0, 65280]).train_x.max() == 12  # as somebody typed


def profile_of_swapped_colours() -> bytes:
    """Make an ICC profile that calls red what sRGB calls blue."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for old, new in ((b"rXYZ", b"????"), (b"bXYZ", b"rXYZ"), (b"????", b"bXYZ")):
        profile = profile.replace(old, new, 1)
    return profile.replace("sRGB".encode("utf-16-be"), "test".encode("utf-16-be"))


def gamma(content: bytes, value: float) -> bytes:
    """Add PNG's chunk of a gamma."""
    chunk = b"gAMA" + struct.pack(">I", round(value * 1e5))
    whole = struct.pack(">I", 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return content[:33] + whole + content[33:]


def test_colours_are_those_of_a_profile_or_a_gamma():
    red, buffer = Image.new("RGB", (4, 4), (255, 0, 0)), io.BytesIO()
    red.save(buffer, "PNG", icc_profile=profile_of_swapped_colours())
    pixel = read_picture(buffer.getvalue(), "it").getpixel((0, 0))
    assert pixel[2] > 250 and pixel[0] < 5
    red.save(buffer := io.BytesIO(), "PNG", icc_profile=b"damaged")
    assert read_picture(buffer.getvalue(), "it").getpixel((0, 0)) == (255, 0, 0)
    Image.new("L", (4, 4), 64).save(buffer := io.BytesIO(), "PNG")
    shades = {
        value: read_picture(gamma(buffer.getvalue(), value), "it", keep_grey=True).getpixel((0, 0))
        for value in (1 / 2.2, 1.0)
    }
    assert shades == {1 / 2.2: 64, 1.0: round(255 * (64 / 255) ** (1 / 2.2))}


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB", "1", "I;16"])
def test_what_is_transparent_is_white(mode):
    values = np.array([[0, 255], [255, 255]], np.uint8)
    if mode == "I;16":
        image = Image.fromarray(values.astype(np.uint16) * 257)
    else:
        image = Image.fromarray(values).convert(mode)
    options = {"transparency": {"RGB": (0, 0, 0)}.get(mode, 0)}
    if mode.endswith("A"):
        image.putalpha(Image.fromarray(values))
        options = {}
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    content = buffer.getvalue()
    if mode == "I;16":  # Pillow does not write it
        start = content.index(b"IDAT") - 4
        clear = struct.pack(">I", 2) + b"tRNS\0\0" + struct.pack(">I", zlib.crc32(b"tRNS\0\0"))
        content = content[:start] + clear + content[start:]
    assert np.asarray(read_picture(content, "it")).min() == 255


@pytest.mark.parametrize("turn", range(2, 9))
def test_pictures_stand_as_people_see_them(turn):
    upright = Image.new("RGB", (16, 8), "red")
    upright.paste("blue", (0, 0, 8, 4))
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    undo[6], undo[8] = Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_270
    undo[3], undo[7] = Image.Transpose.ROTATE_180, Image.Transpose.TRANSVERSE
    exif = Image.Exif()
    exif[0x0112] = turn
    buffer = io.BytesIO()
    upright.transpose(undo[turn]).save(buffer, "PNG", exif=exif)
    assert np.array_equal(read_picture(buffer.getvalue(), "it"), upright)


def test_equal_pictures_are_refused(tmp_path):
    for load_them in (images, imagenet):
        folder = tmp_path / load_them.__name__
        for part in ("train", "val"):
            for i in range(20):
                (folder / part / str(i % 2)).mkdir(parents=True, exist_ok=True)
                Image.new("RGBA", (8, 8), (i, 0, 0, 0)).save(
                    folder / part / str(i % 2) / f"{i}.png"
                )
        with pytest.raises(UserError, match="the 20 training pictures are all equal"):
            load_them(str(folder), image_size=8)


def test_one_set_of_rules_for_files_of_both_loaders(tmp_path):
    write_classes(tmp_path / "elsewhere", ("",))
    write_classes(tmp_path / "set", ("Train", "Val"))
    train = tmp_path / "set" / "Train"
    (train / ".ipynb_checkpoints").mkdir()
    (train / "cats" / "._0.PNG").write_bytes(b"x")
    (train / "cats" / "0.PNG").rename(train / "cats" / "0.JFIF")
    (train / "dogs" / "notes.txt").touch()
    (train / "dogs" / "gone.png").symlink_to(tmp_path / "gone")
    (train / "dogs" / "more").symlink_to(tmp_path / "elsewhere" / "dogs")
    (train / "dogs" / "round").symlink_to(train / "dogs")
    for data in (images(str(tmp_path / "set")), imagenet(str(tmp_path / "set"), 16, loaders=0)):
        assert data.labels.tolist() == 8 * [0] + 16 * [1] and list(data.names) == ["cats", "dogs"]
        assert data.describe() == (
            "24 pictures to train on, 16 to test on; left out: 1 broken links, 2 hidden, 1 links"
            " back to a folder above, 1 of suffix .txt"
        )


def test_folders_that_hold_themselves_or_have_two_unicode_forms(tmp_path):
    write_classes(tmp_path, ("train", "val"))
    for part, form in (("train", "NFC"), ("val", "NFD")):
        (tmp_path / part / "cats").rename(tmp_path / part / unicodedata.normalize(form, "é"))
    (tmp_path / "train" / "dogs" / "all").symlink_to(tmp_path / "train")
    for data in (images(str(tmp_path)), imagenet(str(tmp_path), 16, loaders=0)):
        assert list(data.names) == ["dogs", unicodedata.normalize("NFC", "é")]
        assert data.labels.tolist() == 8 * [0] + 8 * [1] and data.test_size == 16


def test_tables_hold_paths_and_truth_values_and_one_may_be_alone(tmp_path):
    write_classes(tmp_path, ("",))
    files = [f"{name}/{i}.PNG" for i in range(8) for name in ("cats", "dogs")]
    for cells in (files, [{"bytes": None, "path": file} for file in files]):
        table = Dataset.from_dict({"image": cells, "label": [i % 2 > 0 for i in range(16)]})
        table.to_parquet(tmp_path / "all.parquet")
        data = images(str(tmp_path / "all.parquet"), image_column="image")
        assert list(data.names) == ["False", "True"] and data.train_size == 14
        assert data.train_x[data.train_y == 0].max() < data.train_x[data.train_y == 1].min()


def test_files_that_number_classes_otherwise_are_refused(tmp_path):
    cells = [{"bytes": picture(8, i % 2), "path": None} for i in range(20)]
    for part, names in (("train", ["cat", "dog"]), ("test", ["dog", "cat"])):
        features = Features({"image": ImageFeature(), "label": ClassLabel(names=names)})
        columns = {"image": cells, "label": [i % 2 for i in range(20)]}
        Dataset.from_dict(columns, features=features).to_parquet(tmp_path / f"{part}-0.parquet")
    with pytest.raises(UserError, match=r"test-0.parquet numbers the classes in label as dog, cat"):
        images(str(tmp_path))


def test_numbers_of_class_labels_stay_and_other_splits_are_left_out(tmp_path):
    names = ["wolf", "bear", "ant", "cat"]
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=names)})
    labels = [(0, 2, 3)[i % 3] for i in range(20)]
    cells = [{"bytes": picture(8, i), "path": None} for i in labels]
    table = Dataset.from_dict({"image": cells, "label": labels}, features=features)
    for part in ("train-0", "train_noisy-0", "test-0"):
        table.to_parquet(tmp_path / f"{part}.parquet")
    data = images(str(tmp_path))
    assert data.train_y.tolist() == labels and data.classes == 4 and list(data.names) == names
    assert "left out: 1 parquet files of other splits" in data.describe()
    (tmp_path / "other").mkdir()
    table.to_parquet(tmp_path / "other" / "train-0.parquet")
    with pytest.raises(UserError, match=r"parquet files of train in \. and in other"):
        images(str(tmp_path))


@pytest.mark.parametrize("ending", ["-idx{}-ubyte", "-idx{}-ubyte.gz", ".idx{}-ubyte"])
def test_idx_files(tmp_path, ending):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 9, 9))
    for part, count in (("train", 20), ("t10k", 12)):
        folder = tmp_path / "MNIST" / "raw"
        write_idx(folder / f"{part}-images{ending.format(3)}", pixels[:count])
        write_idx(folder / f"{part}-labels{ending.format(1)}", 1 + np.arange(count) % 5)
    data = images(str(tmp_path))
    assert (data.train_size, data.test_size, data.classes) == (20, 12, 5)
    assert torch.equal(data.train_x[:, 0], torch.from_numpy(pixels.astype(np.uint8)))
    assert data.test_y.tolist() == [i % 5 for i in range(12)]


def test_tables_of_any_names(tmp_path):
    cells = [{"bytes": picture(8, i % 3), "path": None} for i in range(20)]
    kinds = [("cat", "dog", "emu")[i % 3] for i in range(20)]
    table = Dataset.from_dict({"id": range(20), "scan": cells, "species": kinds})
    table.to_parquet(tmp_path / "all.parquet")
    with pytest.raises(UserError, match=r"columns id, scan, species: type dataset.label_column="):
        images(str(tmp_path))
    data = images(str(tmp_path), label_column="species")
    assert (data.train_size, data.test_size, data.classes) == (18, 2, 3)
    table.rename_column("species", "label").to_parquet(tmp_path / "all.parquet")
    assert torch.equal(images(str(tmp_path)).train_x, data.train_x)
    numbers = [float(i % 3) for i in range(len(table))]  # beside id, which has whole numbers
    table.add_column("label", numbers).to_parquet(tmp_path / "all.parquet")
    assert images(str(tmp_path)).classes == 3
    with pytest.raises(UserError, match=r"column id holds .*, not pictures"):
        images(str(tmp_path), image_column="id")
    write_classes(tmp_path / "folders")
    with pytest.raises(UserError, match="label_column=species is of parquet files"):
        images(str(tmp_path / "folders"), label_column="species")


@pytest.mark.parametrize("ending", [".parquet", "_0.parquet"])
def test_tables_may_be_called_like_the_parts_alone(tmp_path, ending):
    for part, count in (("train", 20), ("test", 10)):
        cells = [{"bytes": picture(8, i % 3), "path": None} for i in range(count)]
        table = Dataset.from_dict({"image": cells, "label": [i % 2 for i in range(count)]})
        table.to_parquet(tmp_path / f"{part}{ending}")
    data = images(str(tmp_path))
    assert (data.train_size, data.test_size) == (20, 10)


def test_pictures_of_all_classes_are_normalised_alike():
    """Also where classes lie one behind the other."""
    y = torch.arange(10).repeat_interleave(2_000)
    x = (25 * y).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    batch, _ = ImageData(x, y, x[:1], y[:1], 10).batch(torch.arange(len(y)), torch.Generator())
    assert batch.mean().abs() < 0.01 and (batch.std() - 1).abs() < 0.01


def test_the_hubs_tables(tmp_path):
    write_cifar(tmp_path, columns=("img", "fine_label"))
    data = images(str(tmp_path))
    assert (data.train_size, data.test_size, data.classes) == (24, 12, 10)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda d: (d / "train/cats/3.PNG").write_bytes(b"x"), r"cats/3.PNG is not a picture"),
        (lambda d: (d / "test/dogs/3.PNG").write_bytes(bomb()), r"dogs/3.PNG is .*bomb"),
        (lambda d: (d / "train/emus").mkdir(), r"train/emus holds no pictures"),
        (lambda d: (d / "train/cats").rename(d / "test/emus"), r"has the class dogs only"),
        (lambda d: (d / "test/cats").rename(d / "test/emus"), r"test has the class emus, which"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said_in_one_line(tmp_path, spoil, sentence):
    write_classes(tmp_path)
    spoil(tmp_path)
    with pytest.raises(UserError, match=sentence) as refused:
        images(str(tmp_path))
    assert "\n" not in str(refused.value)


def test_a_folder_without_pictures_says_what_it_may_hold(tmp_path):
    with pytest.raises(UserError, match=r"holds no pictures: give a folder with train/CLASS/\*"):
        images(str(tmp_path))
    with pytest.raises(UserError, match=r"nowhere is not a folder: give a folder with train/CLASS"):
        images(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("shape", "content"),
    [((20, 9, 9), 100), ((20, 9, 9), 20 * 81 + 1), ((2**31, 2**20, 9), 9), ((20,), 20)],
)
def test_damaged_idx_files_are_named(tmp_path, shape, content):
    header = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(header + content * b"x")
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.arange(20) % 2)
    with pytest.raises(UserError, match="train-images-idx3-ubyte"):
        images(str(tmp_path))
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match="lacks the labels"):
        images(str(tmp_path))


def test_too_many_pixels_for_the_memory_are_refused_before_they_are_decoded(tmp_path):
    buffer = io.BytesIO()
    Image.new("1", (6000, 6000)).save(buffer, "PNG")
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for i in range(20):
            (tmp_path / label / f"{i}.png").write_bytes(buffer.getvalue())
    with pytest.raises(UserError, match=r"40 pictures of 6000 x 6000 pixels take 4.3 GB"):
        images(str(tmp_path))


@pytest.mark.parametrize("loaders", [0, 1])
def test_a_damaged_picture_that_is_decoded_later_is_named_too(tmp_path, loaders):
    write_imagenet_folders(tmp_path)
    file = tmp_path / "train" / "n00000001" / "2.JPEG"
    file.write_bytes(file.read_bytes()[:-100])
    data = imagenet(str(tmp_path), image_size=16, loaders=loaders)
    with pytest.raises(TrainingFailed, match=r"n00000001/2.JPEG is not a picture.*trunc") as failed:
        list(data.batches([(torch.tensor([10]), 0)]))
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize("names", [("Train", "Test"), ("training", "testing"), ("train", "valid")])
def test_parts_have_the_names_that_people_give_them(tmp_path, names):
    write_classes(tmp_path, names)
    data = images(str(tmp_path))
    assert (data.train_size, data.test_size, data.classes) == (16, 16, 2)


def test_a_class_may_be_called_like_a_part(tmp_path):
    write_classes(tmp_path, ("",))
    (tmp_path / "cats").rename(tmp_path / "train")
    assert images(str(tmp_path)).classes == 2
    (tmp_path / "dogs").rename(tmp_path / "test")  # now both are parts, without classes
    with pytest.raises(UserError, match="holds no folders of classes: give a folder"):
        images(str(tmp_path))


def test_test_pictures_without_classes_are_not_left_out_in_silence(tmp_path):
    write_classes(tmp_path, ("train",))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "0.png").write_bytes(picture(16, 0))
    with pytest.raises(UserError, match=r"test holds pictures, but no folders of classes"):
        images(str(tmp_path))


def test_a_size_that_no_memory_has_is_refused_before_a_picture_is_scaled(tmp_path):
    write_classes(tmp_path)
    with pytest.raises(UserError, match=r"pixels take .* GB in memory"):
        images(str(tmp_path), image_size=10**6)


def test_transparent_palettes_are_read_without_a_warning(tmp_path, recwarn):
    write_classes(tmp_path)
    clear = Image.open(tmp_path / "train/cats/0.PNG").quantize(8)
    clear.save(tmp_path / "train/cats/0.PNG", transparency=bytes(4) + b"\xff" * 4)
    shades = np.asarray(clear.convert("RGB")).copy()
    shades[np.asarray(clear) < 4] = 255
    assert torch.equal(images(str(tmp_path)).train_x[0], torch.from_numpy(shades).permute(2, 0, 1))
    assert not recwarn


def test_idx_files_of_which_some_are_missing_or_too_many(tmp_path):
    pixels = np.zeros((20, 8, 8))
    for name in ("a", "b"):
        write_idx(tmp_path / name / "t10k-images-idx3-ubyte", pixels)
        write_idx(tmp_path / name / "t10k-labels-idx1-ubyte", np.arange(20) % 2)
    with pytest.raises(UserError, match="both there: give the folder of one set"):
        images(str(tmp_path))
    with pytest.raises(UserError, match="has no files to train on"):
        images(str(tmp_path / "a"))
    write_idx(tmp_path / "b" / "train-images-idx3-ubyte", pixels[:0])
    write_idx(tmp_path / "b" / "train-labels-idx1-ubyte", np.arange(0))
    with pytest.raises(UserError, match="holds no pictures: copy it again"):
        images(str(tmp_path / "b"))


def test_too_few_pictures_to_hold_some_out_are_refused(tmp_path):
    write_classes(tmp_path)
    for file in tmp_path.glob("train/*/[2-9].PNG"):
        file.unlink()
    node = {"_target_": "dlion.suite.data.images", "path": str(tmp_path), "validation": True}
    with pytest.raises(UserError, match="holds out a tenth of the 4 training samples"):
        load(OmegaConf.create(node))


def test_tables_lie_in_folders_of_any_name(tmp_path, capfd):
    cells = [{"bytes": picture(8, i % 3), "path": None} for i in range(20)]
    folder = tmp_path / "a [1]*"
    folder.mkdir()
    table = Dataset.from_dict({"image": cells, "label": [i % 3 for i in range(20)]})
    table.to_parquet(folder / "train-0.parquet")
    assert images(str(tmp_path)).train_size == 18
    table.add_column("more", list(range(20))).to_parquet(folder / "test-0.parquet")
    capfd.readouterr()
    with pytest.raises(UserError, match=r"do not fit together \(.* column names don't match"):
        images(str(tmp_path))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("label", [-1, 10**9, 0.5, None])
def test_labels_of_imagenet_that_are_none(tmp_path, label):
    cells = [{"bytes": picture(8, i % 3), "path": None} for i in range(6)]
    for split in ("train", "validation"):
        labels = [0, 1, 2, 0, 1, label]
        table = Dataset.from_dict({"image": cells, "label": labels})
        table.to_parquet(tmp_path / f"{split}-0.parquet")
    with pytest.raises(UserError, match=r"labels from|whole numbers"):
        imagenet(str(tmp_path))


def test_pictures_of_imagenet_have_labels_before_they_are_decoded(tmp_path):
    write_imagenet_folders(tmp_path)
    data = imagenet(str(tmp_path), image_size=32, loaders=0)
    for part in (data, data.hold_out()):
        assert part.labels.tolist() == [label for _, label in part.train]


def test_a_folder_of_save_to_disk_is_what_its_parquet_files_are(tmp_path):
    write_cifar(tmp_path / "parquet", classes=2)
    tables = load_dataset("parquet", data_dir=str(tmp_path / "parquet" / "plain_text"))
    tables["noisy"] = tables["test"]
    tables.save_to_disk(tmp_path / "saved")
    first, second = (images(str(tmp_path / name)) for name in ("parquet", "saved"))
    assert torch.equal(first.train_x, second.train_x) and torch.equal(first.test_y, second.test_y)
    assert second.names == ("class 0", "class 1") and second.left_out["rows of noisy"] == 12
    (tmp_path / "saved" / "dataset_dict.json").write_text("{")
    with pytest.raises(UserError, match="is of save_to_disk, but could not be read"):
        images(str(tmp_path / "saved"))


def test_white_may_be_zero_in_16_bits(tmp_path):
    file, ramp = tmp_path / "ramp.tif", np.arange(256, dtype=np.uint16).reshape(16, 16) * 256
    Image.fromarray(ramp).save(file)
    usual = np.asarray(read_picture(file, "ramp", keep_grey=True))
    tag = bytes.fromhex("060103000100000001")  # photometric interpretation: black is zero
    assert file.read_bytes().count(tag) == 1
    file.write_bytes(file.read_bytes().replace(tag, tag[:-1] + b"\0"))
    assert np.array_equal(np.asarray(read_picture(file, "ramp", keep_grey=True)), 255 - usual)


def test_folders_of_parts_are_no_classes(tmp_path):
    write_classes(tmp_path / "parts", ("training_set", "test_set"))
    data = images(str(tmp_path / "parts"), image_size=8)
    assert data.train_size == data.test_size and data.names == imagenet(tmp_path / "parts").names
    (tmp_path / "parts" / "test_set").rename(tmp_path / "parts" / "fold_2")
    (tmp_path / "parts" / "training_set").rename(tmp_path / "parts" / "fold_1")
    with pytest.raises(UserError, match="if those are the classes, call the outer ones train"):
        images(str(tmp_path / "parts"), image_size=8)
    with pytest.raises(UserError, match=r"or type dataset\.path=.*fold_2"):
        (tmp_path / "outer").mkdir()
        (tmp_path / "parts" / "fold_2").rename(tmp_path / "outer" / "fold_2")
        images(str(tmp_path / "outer"), image_size=8)
    for picture_file in [p for p in (tmp_path / "outer").rglob("*") if p.is_file()]:
        picture_file.rename(picture_file.with_suffix(".heic"))
    with pytest.raises(UserError, match=r"holds no pictures \(left out: \d+ of suffix .heic\)"):
        images(str(tmp_path / "outer"))


def test_a_models_input_says_what_it_takes(tmp_path):
    write_classes(tmp_path)
    made, files = images(str(tmp_path)).input, sorted(tmp_path.rglob("*.PNG"))[:3]
    assert (
        torch.equal(made(files), made(*map(str, files))) and made(files[0].read_bytes()).ndim == 4
    )
    for wrong in (torch.zeros(3, 4, 4), np.zeros((4, 4)), None, 3):
        with pytest.raises(UserError, match=r"a picture is a file, .*, not "):
            made(wrong)
    with pytest.raises(UserError, match="there are no pictures"):
        made()
    text = TextInput(Bytes(), context=4)
    assert text("größe").tolist() == [list("größe".encode())[-4:]]
    for wrong, reason in (("", "has no tokens"), (["a", "b"], "give one text, not list")):
        with pytest.raises(UserError, match=reason):
            text(wrong)
