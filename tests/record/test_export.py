"""The trained model of a run is taken away."""

import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dlion
from dlion.errors import UserError
from dlion.suite.files import sha256_of_tensors
from dlion.suite.models import gpt
from dlion.suite.models.shapes import TextShape
from dlion.suite.record.export import main
from dlion.suite.training.weights import save_model
from tests.compare.runs import write_run

TENSORS = {"layer.weight": torch.arange(6.0).reshape(2, 3), "layer.bias": torch.zeros(2)}


@pytest.fixture
def run(tmp_path):
    """A finished run that has left its model."""
    write_run(tmp_path, "g_lion", 0)
    save_file(TENSORS, tmp_path / "g_lion-0-0.001" / "model.safetensors")
    return tmp_path / "g_lion-0-0.001"


def same(tensors: dict[str, torch.Tensor]) -> bool:
    return tensors.keys() == TENSORS.keys() and all(
        torch.equal(tensors[name], TENSORS[name]) for name in TENSORS
    )


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_model_is_copied_with_what_it_is(run, tmp_path, capsys):
    main([str(tmp_path), "-o", str(tmp_path / "mine" / "digits")])
    folder = tmp_path / "mine" / "digits"
    assert capsys.readouterr().out == f"{folder}\n"
    assert names(folder) == ["config.yaml", "model.safetensors", "summary.json"]
    assert same(load_file(folder / "model.safetensors"))
    assert json.loads((folder / "summary.json").read_text())["optimizer"] == "g_lion"
    with pytest.raises(UserError, match="is an export, for use without dlion: give the directory"):
        dlion.load_model(folder)
    main([str(run)])  # again, and beside the run: it stays one run
    main([str(tmp_path), "-o", str(folder)])
    assert names(run / "export") == names(folder)


def test_it_is_a_state_dict_where_that_is_wanted(run):
    main([str(run), "--format", "state_dict"])
    assert same(torch.load(run / "export" / "model.pt", weights_only=True))


def test_a_state_dict_has_all_names_of_a_tensor(run):
    model = gpt(TextShape(vocabulary=8, context=4), depth=1, dim=8, heads=2)
    save_model(model, TextShape(vocabulary=8, context=4), run)
    main([str(run), "--format", "state_dict"])
    again = gpt(TextShape(vocabulary=8, context=4), depth=1, dim=8, heads=2)
    again.load_state_dict(torch.load(run / "export" / "model.pt", weights_only=True))
    assert again.head.weight is again.tokens.weight
    assert torch.equal(again.head.weight, model.head.weight)


def test_a_model_of_transformers_keeps_all_its_files(run):
    model = run / "model"
    model.mkdir()
    (run / "model.safetensors").rename(model / "model-1.safetensors")
    save_file({"head": torch.ones(1)}, model / "model-2.safetensors")
    (model / "config.json").write_text("{}")
    main([str(run)])
    assert names(run / "export") == [
        *("config.json", "config.yaml", "model-1.safetensors", "model-2.safetensors"),
        "summary.json",
    ]
    main([str(run), "--format", "state_dict", "-o", str(run / "one")])
    assert torch.load(run / "one" / "model.pt", weights_only=True).keys() == {*TENSORS, "head"}


@pytest.mark.parametrize("form", ["safetensors", "state_dict"])
@pytest.mark.parametrize("cut", [100, -1])
def test_a_damaged_model_is_not_taken(run, form, cut):
    file = run / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(UserError, match=r"model.safetensors is damaged .*: copy it again"):
        main([str(run), "--format", form])
    assert not (run / "export").exists()


def test_what_cannot_be_taken_is_said_and_leaves_nothing(run):
    (run / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        main([str(run), "--format", "state_dict"])
    assert not (run / "export").exists()
    (run / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"holds no model\.safetensors"):
        main([str(run)])
    (run / "summary.json").unlink()
    with pytest.raises(UserError, match="is not finished"):
        main([str(run)])


@pytest.mark.parametrize("form", ["safetensors", "state_dict"])
def test_a_full_disk_is_said_with_the_name_of_the_file(run, form):
    save_file({"big": torch.zeros(10_000)}, run / "model.safetensors")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        with pytest.raises(OSError) as raised:
            main([str(run), "--format", form])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert Path(raised.value.filename).name.startswith("model.")
    assert names(run / "export") == []


def test_another_model_in_its_place_is_not_taken(run):
    file, summary = run / "model.safetensors", run / "summary.json"
    facts = json.loads(summary.read_text()) | {"model_sha256": sha256_of_tensors([file])}
    summary.write_text(json.dumps(facts))
    main([str(run)])
    save_file({name: tensor + 1 for name, tensor in TENSORS.items()}, file)
    with pytest.raises(UserError, match="is not the model that the run has left"):
        main([str(run)])
