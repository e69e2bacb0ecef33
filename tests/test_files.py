"""Files and folders are whole, or they are as they were."""

from pathlib import Path

import pytest

from dlion.suite.files import whole_folder


def test_a_folder_is_replaced_as_a_whole_or_stays(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    for content in ("first", "second"):
        with whole_folder(folder) as part:
            (part / "file").write_text(content)
    assert (folder / "file").read_text() == "second"
    rename = Path.rename

    def fail_once(path, target):
        if path.suffix == ".part":
            raise OSError("the disk is gone")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(OSError, match="the disk is gone"), whole_folder(folder) as part:
        (part / "file").write_text("third")
    assert (folder / "file").read_text() == "second"
    assert [*tmp_path.iterdir()] == [folder]
