"""Which parameters of a model are matrices of hidden layers: known by their modules.

``python -m tests.models.test_param_groups`` writes what is found now to models.json, to be read
before it is committed.
"""

import contextlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dlion
from dlion.methods.groups import MATRIX
from dlion.methods.muon import NewtonSchulz, orthogonalise
from dlion.suite.data.torchvision_ops import declare_missing_operators

EXPECTED = Path(__file__).with_name("models.json")
OF_ITSELF = {MATRIX, "vector", "scale"}  # by shape, or by the type of the module


def roles(model: nn.Module) -> dict[str, list[str]]:
    """Return names by what is said of them, but for matrices [out, in] and vectors."""
    found: dict[str, list[str]] = {}
    for line in repr(dlion.param_groups(model)).splitlines()[:-1]:
        name, _, what = re.split("  +", line.strip())
        name = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
        if what not in OF_ITSELF and name not in found.setdefault(what, []):
            found[what].append(name)
    return found


def build(name: str) -> nn.Module:
    """Build a model without memory: of timm, torchvision, or a class of transformers."""
    library, kind, *task = name.split()
    with torch.device("meta"):
        if library == "timm":
            import timm

            return timm.create_model(kind)
        if library == "torchvision":
            import torchvision

            make = torchvision.models.get_model_builder(kind)
            none = {"weights_backbone", "weights"} & {*inspect.signature(make).parameters}
            return make(**dict.fromkeys(none))
        import transformers

        config = transformers.AutoConfig.for_model(kind)
        for layers in ("num_hidden_layers", "n_layer", "num_layers"):
            if isinstance(getattr(config, layers, None), int):
                with contextlib.suppress(NotImplementedError):  # a sum of others
                    setattr(config, layers, min(3, getattr(config, layers)))
        return getattr(transformers, task[0])(config)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["timm", "torchvision", "transformers"])
def test_matrices_of_real_models_are_found(library):
    declare_missing_operators()
    expected = {k: v for k, v in json.loads(EXPECTED.read_text()).items() if k.startswith(library)}
    found = {name: roles(build(name)) for name in expected}
    assert len(found) >= 30
    wrong = {name: (found[name], expected[name]) for name in found if found[name] != expected[name]}
    assert not wrong


class Attention(nn.Module):
    """A teaching GPT's: heads are a list, each with its own query, key and value."""

    def __init__(self, dim: int = 16, heads: int = 2):
        super().__init__()
        self.heads = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(dim, dim // heads, False) for name in "qkv"})
            for _ in range(heads)
        )
        self.proj = nn.Linear(dim, dim)


class TeachingGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.lookup, self.where = nn.Embedding(30, 16), nn.Embedding(8, 16)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.to_logits = nn.Linear(16, 30)


class Siamese(nn.Module):
    """The whole network has a name that sounds like a table's."""

    def __init__(self):
        super().__init__()
        self.embedding_net = nn.Sequential(
            nn.Conv2d(1, 8, 5), nn.PReLU(), nn.Flatten(), nn.Linear(72, 32), nn.Linear(32, 2)
        )


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(16, 40)


class Annotated(nn.Module):
    """The layers of the annotated transformer, whose generator comes last."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2)
        self.src_embed = nn.Sequential(nn.Embedding(40, 16))
        self.generator = Generator()


class Factors(nn.Module):
    """A recommender: two tables and a small network."""

    def __init__(self):
        super().__init__()
        self.user_factors, self.item_factors = nn.Embedding(20, 8), nn.EmbeddingBag(30, 8)
        self.net = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 1))


class Experts(nn.Module):
    """[E, rows, columns] under a name that does not say so."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(3, *shape)) for shape in [(12, 8), (8, 12)])


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.ffn, self.head = Experts(), nn.Linear(8, 5)


class Depthwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.mix, self.point = nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 16, 1)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2), nn.Linear(8, 4)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 16))
        self.policy, self.value = nn.Linear(16, 6), nn.Linear(16, 3)


def network(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, outputs))


class ActorAndCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = network(4), network(3)


class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = network(4), network(4)


class Contrastive(nn.Module):
    """MoCo's: two encoders of one shape."""

    def __init__(self):
        super().__init__()
        self.query, self.key = (
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(72, 5)) for _ in range(2)
        )


class HeadFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.table = nn.Linear(16, 40), nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(network(9) for _ in range(2))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.inner, self.output = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9)
        self.output.weight = self.table.weight
        self.scale = nn.LayerNorm([3, 6])
        self.places = nn.Parameter(torch.zeros(7, 6))


def hidden(model: nn.Module) -> set[str]:
    return {found.name for found in dlion.param_groups(model).found if found.role == MATRIX}


@pytest.mark.parametrize(
    ("make", "matrices"),
    [
        (
            TeachingGPT,
            {f"layers.{i}.proj" for i in (0, 1)}
            | {f"layers.{i}.heads.{h}.{n}" for i in (0, 1) for h in (0, 1) for n in "qkv"},
        ),
        (Siamese, {"embedding_net.0", "embedding_net.3"}),
        (
            Annotated,
            {
                f"encoder.layers.{i}.{name}"
                for i in (0, 1)
                for name in ("self_attn.in_proj", "self_attn.out_proj", "linear1", "linear2")
            },
        ),
        (Factors, {"net.0"}),
        (Depthwise, {"point", "up"}),
        (TwoHeads, {"trunk.0", "trunk.2"}),
        (ActorAndCritic, {"actor.0", "critic.0"}),
        (Twins, {"one.0", "other.0"}),
        (Contrastive, {"query.0", "key.0"}),
        (HeadFirst, {f"blocks.{i}.{layer}" for i in (0, 1) for layer in (0, 2)}),
        (Tied, {"inner"}),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), None),
    ],
)
def test_matrices_are_found_by_what_they_are(make, matrices):
    if matrices is None:
        with pytest.raises(ValueError, match="Linear has no matrix in a hidden layer: choose a m"):
            dlion.param_groups(make())
        return
    found = hidden(make())
    assert found == {f"{name}{'_' if name.endswith('in_proj') else '.'}weight" for name in matrices}


def test_groups_are_those_that_an_optimizer_takes_and_print_as_a_table():
    model = Tied()
    groups = dlion.param_groups(model)
    assert [group["use_muon"] for group in groups] == [True, False]
    assert hidden(model) == {"inner.weight"}
    assert str(groups).splitlines() == [
        "places        [7, 6]  of unknown use",
        "table.weight  [9, 6]  table",
        "inner.weight  [6, 6]  matrix",
        "scale.weight  [3, 6]  scale",
        "scale.bias    [3, 6]  scale",
        "36 of 183 parameters are in matrices",
    ]
    optimizer = dlion.SignMuon(groups, lr=1e-2)
    assert optimizer.param_groups[0]["param_names"] == ["inner.weight"]
    assert hidden(model) | {"places"} == {
        found.name
        for found in dlion.param_groups(model, matrices=["^places$"]).found
        if found.role == MATRIX
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rest": ["nowhere"]}, "rest=nowhere matches no parameter of two or more dimensions"),
        ({"rest": ["bias"]}, "rest=bias matches no parameter"),
        ({"rest": ["inner"]}, "Tied has no matrix in a hidden layer"),
        ({"rest": "("}, r"rest=\( is no regular expression"),
        ({"split": {"inner": 4}}, "split=4 of inner.weight does not fit a matrix of 6 outputs"),
        (
            {"split": {"inner": (2, 3)}},
            r"split=\(2, 3\) of inner.weight does not fit a",
        ),
        (
            {"split": {"inner": 0}},
            "split=0 of inner.weight: give how many equal matrices",
        ),
        ({"split": {"inner": (9, -3)}}, r"split=\(9, -3\) of inner.weight: give how many equal"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(options, message):
    model = Tied()
    del model.scale
    with pytest.raises(ValueError, match=message):
        dlion.param_groups(model, **options)


def step_of(groups: list[dict], **options: object) -> Iterator[torch.Tensor]:
    """Yield how far a step of Muon of rate 1 moves each parameter that has a gradient."""
    params = [
        param
        for group in groups
        for _, param in group["params"]
        if param.grad is not None and group["use_muon"]
    ]
    before = [param.detach().clone() for param in params]
    settings = {"lr": 1.0, "weight_decay": 0.0, "ns_precision": "float32", **options}
    dlion.GMuon(groups, **settings).step()
    for param, old in zip(params, before, strict=True):
        yield old - param.detach()


def polar(matrix: torch.Tensor) -> torch.Tensor:
    return orthogonalise([matrix], NewtonSchulz(5, "float32"))[0]


def test_each_expert_of_a_stack_is_a_matrix():
    model = Mixture()
    for param in (model.ffn.up, model.ffn.down):
        param.grad = torch.randn_like(param)
    gradients = [model.ffn.up.grad.clone(), model.ffn.down.grad.clone()]
    groups = dlion.param_groups(model)
    assert [group.get("stacked") for group in groups] == [True, None]
    for moved, grad in zip(step_of(groups), gradients, strict=True):
        expected = torch.stack([polar(each) for each in grad]) * 0.2 * 12**0.5
        torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-5)
        for each in moved / (0.2 * 12**0.5):
            values = torch.linalg.svdvals(each)
            assert values.min() > 0.4 and values.max() < 1.3


def test_a_matrix_that_is_stored_as_in_out_has_the_scale_of_its_outputs():
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(Conv1D(24, 6), nn.Linear(24, 4))  # 24 outputs of 6 inputs
    model[0].weight.grad = torch.randn(6, 24)
    grad = model[0].weight.grad.clone()
    groups = dlion.param_groups(model)
    assert groups[0]["transposed"] and hidden(model) == {"0.weight"}
    (moved,) = step_of(groups, adjust_lr="original")
    torch.testing.assert_close(moved, polar(grad) * (24 / 6) ** 0.5, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [3, (8, 2, 2)])
def test_fused_matrices_are_split_on_request(sizes, transposed):
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(12, 6) if transposed else nn.Linear(6, 12)
    model = nn.Sequential(layer, nn.Linear(12, 4))
    layer.weight.grad = torch.randn_like(layer.weight)
    dim = 1 if transposed else 0
    parts = layer.weight.grad.clone().split(4 if sizes == 3 else list(sizes), dim)
    groups = dlion.param_groups(model, split={r"^0\.": sizes})
    (moved,) = step_of(groups)
    scaled = [polar(part) * 0.2 * max(part.shape) ** 0.5 for part in parts]
    torch.testing.assert_close(moved, torch.cat(scaled, dim), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["sign_muon_avg", "muon_adm", "ef21_muon", "muloco", "dion"])
def test_all_methods_for_matrices_take_stacks_and_splits(method):
    torch.manual_seed(0)
    model = Mixture()
    x = torch.randn(16, 8)
    target = torch.randint(5, (16,))
    found = dlion.methods.METHODS[method]
    groups = dlion.param_groups(model, split={"up": 2})
    options = {"local_steps": 1} if method == "muloco" else {}
    optimizer = found.cls(groups, lr=3e-2, **found.options, **options)
    losses = []
    for _ in range(30):
        inner = torch.einsum("nd,erd->enr", x, model.ffn.up).relu()
        loss = F.cross_entropy(
            model.head(torch.einsum("enr,edr->nd", inner, model.ffn.down)), target
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


if __name__ == "__main__":
    declare_missing_operators()
    known = json.loads(EXPECTED.read_text())
    lines = [f"{json.dumps(name)}: {json.dumps(roles(build(name)))}" for name in known]
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
