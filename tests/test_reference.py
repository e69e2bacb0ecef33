"""The public names are documented, and the examples of docstrings run."""

import ast
import doctest
import re
import textwrap
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import dlion
from dlion import optim
from tests.conftest import ROOT

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef


def examples() -> Iterator[tuple[str, str]]:
    """Yield place and text of each block behind ``::`` and of each doctest in a docstring.

    Those that need a framework, a lighthouse or a run are in examples/, which test_example.py runs.
    """
    for path in sorted((ROOT / "src").rglob("*.py")):
        if path.parent.name == "frameworks" or path.name in (
            "joining.py",
            "inputs.py",
            "weights.py",
        ):
            continue
        source = path.read_text()
        if "::\n" not in source and ">>>" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            name = f"{path.relative_to(ROOT / 'src')}:{getattr(node, 'name', '')}"
            blocks = re.findall(r"(?<=::\n)(?:\n+ +.*)+", text or "")
            yield from ((name, textwrap.dedent(block)) for block in blocks)
            if ">>>" in (text or ""):
                yield name, text


@pytest.fixture
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("name", "text"), [pytest.param(*each, id=each[0]) for each in examples()])
def test_an_example_of_a_docstring_runs(group, name, text):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    batches = [torch.randn(3, 4) for _ in range(4)]

    def loss_of(batch):
        return model(batch).square().mean()

    names = {name: getattr(dlion, name) for name in dlion.__all__}
    names |= {"model": model, "batches": batches, "loss_of": loss_of, "loss": loss_of(batches[0])}
    names |= {"init_device_mesh": dist.init_device_mesh, "fully_shard": fully_shard}
    names |= {"nodes": 1, "gpus": 1}
    names |= {"dlion": dlion}
    if ">>>" in text:
        test = doctest.DocTestParser().get_doctest(text, names, name, None, None)
        assert doctest.DocTestRunner().run(test).failed == 0
    else:
        before = model[0].weight.clone()
        exec(text.replace('"cuda"', '"cpu"'), names)
        assert "step()" not in text or not torch.equal(model[0].weight, before)


def test_the_public_names_are_those_of_the_optimizers_and_what_they_need():
    rest = {"TrainingFailed", "UserError", "Workers", "load_model"}
    rest |= {"join", "replicate", "check_replicas", "param_groups"}
    assert set(dlion.__all__) == {*optim.__all__, *rest}


def test_every_method_says_when_not_to_use_it():
    for name in set(optim.__all__) - {"DistributedOptimizer", "LocalUpdate"}:
        assert "hen not to use it" in " ".join(getattr(optim, name).__doc__.split()), name
