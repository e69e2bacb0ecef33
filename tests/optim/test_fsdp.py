"""Models that FSDP2 has sharded: replicas are the workers, and results those of whole models."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_module

from dlion.extensions.shards import local_part
from dlion.methods import simple
from dlion.optim import (
    DGC,
    DeMo,
    DiLoCo,
    Dion,
    DLion,
    EF21Muon,
    GAdamW,
    GMuon,
    LionCub,
    MuonADM,
    PowerSGD,
    SignMuon,
    SparseLoCo,
)
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.workers import Workers
from tests.support.refusals import refused

pytestmark = pytest.mark.slow

LR, BETAS, WD, STEPS = 1e-2, (0.9, 0.99), 0.1, 4
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Net(nn.Module):
    """Tied weights, sizes that two and four do not divide, and fewer rows than processes.

    Experts are in one parameter, also where there is one of them.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 5)
        self.narrow = nn.Linear(5, 1)
        self.back = nn.Linear(1, 6)
        self.experts = nn.ParameterDict({"w": torch.randn(3, 6, 6)})
        self.shared_experts = nn.ParameterDict({"w": torch.randn(1, 6, 6)})
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.back(self.narrow(torch.tanh(self.hidden(self.embed(tokens)))))
        experts = self.experts["w"].mean(0) + self.shared_experts["w"][0]
        hidden = torch.tanh(hidden @ experts) + hidden
        return self.head(hidden).float()


def loss(model: nn.Module, step: int, replica: int, shard: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * replica + shard)
    tokens = torch.randint(11, (8, 3), generator=generator)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def sharded(mesh: DeviceMesh, **policy: Any) -> nn.Module:
    model = Net()
    for part in (model.hidden, model):
        fully_shard(part, mesh=mesh["shard"], **policy)
    return model


def whole(model: nn.Module) -> Tensor:
    return torch.cat([param.full_tensor().detach().flatten() for param in model.parameters()])


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, **how: Any
) -> Tensor:
    run = torch.compile(model, backend="aot_eager") if how.get("compiled") else model
    for step in range(STEPS):
        for micro in range(how.get("accumulate", 1)):
            loss(run, step + 50 * micro, *mesh.get_coordinate()).backward()
        if "clip" in how:
            torch.nn.utils.clip_grad_norm_(model.parameters(), how["clip"])
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def specified(mesh: DeviceMesh, dtype: torch.dtype, **how: Any) -> Tensor:
    """What D-Lion does with as many workers as the mesh has replicas, without shards."""
    model = Net()
    params = list(model.parameters())
    x = torch.cat([param.detach().flatten() for param in params])
    replicas, shards = mesh.shape
    m, previous = torch.zeros(replicas, len(x)), torch.ones(len(x))

    def vote(step: int, signs: Tensor) -> Tensor:
        return simple.untie(signs.sum(0), step, "previous", previous, x)

    def gradient(step: int, replica: int) -> Tensor:
        parts = []
        for shard in range(shards):
            used = copy.deepcopy(model).to(dtype)
            for micro in range(how.get("accumulate", 1)):
                loss(used, step + 50 * micro, replica, shard).backward()
            parts.append(torch.cat([p.grad.float().flatten() for p in used.parameters()]))
        mean = sum(parts) / shards
        return mean * min(1.0, how["clip"] / mean.norm()) if "clip" in how else mean

    for step in range(STEPS):
        g = torch.stack([gradient(step, replica) for replica in range(replicas)])
        simple.dlion(x, m, g, step, LR, BETAS, WD, partial(vote, step))
        nn.utils.vector_to_parameters(x, params)
    return x


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True, "bucket_cap_mb": 1e-4},
    "bf16": {"policy": {"mp_policy": BF16}},
    "clip": {"clip": 0.3},
    "accumulate": {"accumulate": 2},
    "compiled": {"compiled": True},
}


FLOAT32 = {"lr": LR, "ns_precision": "float32"}
OTHERS: dict[str, tuple[type, dict[str, Any]]] = {
    "GAdamW": (GAdamW, {}),
    "DiLoCo": (DiLoCo, {"local_steps": 2}),
    "LionCub": (LionCub, {"bits": 1, "momentum_sync": 2, "sync_pattern": "narrow"}),  # one shard
    # a matrix is whole on one process of its shard group
    "GMuon": (GMuon, FLOAT32),
    "SignMuon": (SignMuon, FLOAT32),
    "SignMuon, polar": (
        SignMuon,
        {**FLOAT32, "aggregation": "avg", "local_polar": True, "rest": "adamw"},
    ),
    "PowerSGD": (PowerSGD, {"rank": 1}),
    "Dion": (Dion, {"lr": LR, "rank_fraction": 0.4}),
    "EF21Muon": (EF21Muon, {**FLOAT32, "density": 0.3}),
    "DeMo": (DeMo, {"chunk": 4, "topk": 3, "value_bits": 16}),
    "DiLoCo, Muon": (DiLoCo, {"inner": "muon", "local_steps": 2}),
    # all entries: which are the largest of a chunk depends on the shards
    "SparseLoCo, Muon": (
        SparseLoCo,
        {"inner": "muon", "local_steps": 2, "topk": 4096, "value_bits": 32},
    ),
}


def both_ways(method: type, settings: dict[str, Any], mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Parameters after training with shards, and with two virtual workers without."""
    model, plain, (alone, _) = sharded(mesh), Net(), dist.new_subgroups(1)
    workers = Workers(local=2, group=alone)
    ours = method(model.named_parameters(), mesh=mesh["replicate"], **settings)
    theirs = method(plain.named_parameters(), workers=workers, **settings)
    ours.load_state_dict(ours.state_dict())  # also of tensors of which a process has no element
    got = train(model, ours, mesh)
    for step in range(STEPS):
        for replica in range(2):
            for shard in range(2):
                (loss(plain, step, replica, shard) / 2).backward()
            theirs.collect(replica)
        theirs.step()
    return got, nn.utils.parameters_to_vector(plain.parameters()).detach()


def left_out(mesh: DeviceMesh) -> bool:
    """Whether a NaN in one shard leaves the whole matrix of that worker out."""
    model, plain, (alone, _) = sharded(mesh), Net(), dist.new_subgroups(1)
    settings = {**FLOAT32, "nonfinite": "skip"}
    ours = SignMuon(model.named_parameters(), mesh=mesh["replicate"], **settings)
    workers = Workers(local=2, group=alone)
    theirs = SignMuon(plain.named_parameters(), workers=workers, **settings)
    replica, shard = mesh.get_coordinate()
    loss(model, 0, replica, shard).backward()
    if (replica, shard) == (0, 0):
        local_part(model.hidden.weight.grad)[0, 0] = torch.nan
    ours.step()
    for each in range(2):
        for part in range(2):
            (loss(plain, 0, each, part) / 2).backward()
        if each == 0:
            plain.hidden.weight.grad[0, 0] = torch.nan
        theirs.collect(each)
    theirs.step()
    expected = nn.utils.parameters_to_vector(plain.parameters()).detach()
    return torch.equal(whole(model), expected) and ours.skipped == (replica == 0)


def in_each_process() -> dict[str, Any]:
    """Return what process 0 has seen; all take part in everything."""
    join_process_group("gloo", 60)
    seen: dict[str, Any] = {}
    for replicas, shards in ((2, 2), (4, 1), (1, 4)):
        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        for name, how in HOW.items() if (replicas, shards) == (2, 2) else [("plain", {})]:
            model = sharded(mesh, **how.get("policy", {}))
            storages = [param.to_local().data_ptr() for param in model.parameters()]
            settings = {k: v for k, v in how.items() if k in ("overlap", "bucket_cap_mb")}
            optimizer = DLion(
                model.named_parameters(), lr=LR, weight_decay=WD, mesh=mesh["replicate"], **settings
            )
            got = train(model, optimizer, mesh, **how)
            dtype = torch.bfloat16 if name == "bf16" else torch.float32
            seen[f"{replicas}x{shards} {name}"] = torch.equal(got, specified(mesh, dtype, **how))
            moved = storages != [param.to_local().data_ptr() for param in model.parameters()]
            sizes = [state["momentum"].numel() for state in optimizer.state.values()]
            seen[f"{replicas}x{shards} {name} moved"] = moved
            seen[f"{replicas}x{shards} {name} state"] = sum(sizes)
        if replicas == 2:
            for name, (method, settings) in OTHERS.items():
                seen[name] = torch.equal(*both_ways(method, settings, mesh))
            seen["left out"] = left_out(mesh)
            seen |= {f"refused {name}": text for name, text in refusals(mesh).items()}
    dist.destroy_process_group()
    return seen


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    hsdp = Net()
    fully_shard(hsdp, mesh=mesh)
    half, plain, replicate = Net(), Net(), mesh["replicate"]
    fully_shard(half.hidden, mesh=mesh["shard"])
    two, other = sharded(mesh), Net()
    fully_shard(other, mesh=replicate)
    both = [*two.parameters(), *other.parameters()]
    whole = distribute_module(Net(), replicate)
    group = replicate.get_group()
    return {
        "nobody said who votes": refused(lambda: DLion(two.parameters())),
        "the shards vote": refused(lambda: DLion(two.parameters(), mesh=mesh["shard"])),
        "hsdp": refused(lambda: DLion(hsdp.parameters(), mesh=replicate)),
        "not sharded at all": refused(lambda: DLion(whole.parameters(), mesh=replicate)),
        "half": refused(lambda: DLion(half.parameters(), mesh=replicate)),
        "two meshes": refused(lambda: DLion(both, mesh=replicate)),
        "a mesh of two dimensions": refused(lambda: DLion(plain.parameters(), mesh=mesh)),
        "mesh and group": refused(
            lambda: DLion(plain.parameters(), mesh=replicate, process_group=group)
        ),
        "clipping": refused(lambda: DGC(two.parameters(), clip_norm=1.0, mesh=replicate)),
        "matrices": refused(lambda: GMuon(two.parameters(), mesh=replicate, overlap=True)),
        "owners": refused(lambda: MuonADM(two.parameters(), mesh=replicate)),
    }


@pytest.fixture(scope="module")
def seen() -> Iterator[dict[str, Any]]:
    import torch._inductor.pattern_matcher  # noqa: F401 - by which all compile: once, not in each

    return run_processes(4, in_each_process)


@pytest.mark.parametrize("case", [*(f"2x2 {name}" for name in HOW), "4x1 plain", "1x4 plain"])
def test_replicas_of_shards_are_workers(seen, case):
    assert seen[case] and not seen[f"{case} moved"]


def test_state_is_sharded_as_the_parameters_are(seen):
    assert seen["2x2 plain state"] < 0.7 * seen["4x1 plain state"]


@pytest.mark.parametrize("method", OTHERS)
def test_other_methods_work_on_shards_too(seen, method):
    assert seen[method]


def test_a_matrix_that_is_not_finite_in_one_shard_is_left_out_whole(seen):
    assert seen["left out"]


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("nobody said who votes", "hold different shards of the parameters: give the mesh"),
        ("the shards vote", "hold different shards of the parameters: give the mesh"),
        ("hsdp", "replicated over a dimension of their mesh (replicate, shard)"),
        ("not sharded at all", "replicated over a dimension of their mesh (replicate)"),
        ("half", "are not sharded"),
        ("two meshes", "sharded over different meshes"),
        ("a mesh of two dimensions", "2 dimensions (replicate, shard): give the one"),
        ("mesh and group", "process_group and mesh both name the participants"),
        ("clipping", "clip_norm=1.0 needs the whole gradient, which FSDP has sharded here"),
        ("owners", "MuonADM needs owners of whole matrices"),
        ("matrices", "GMuon gathers matrices that FSDP has sharded, which overlap=True cannot"),
    ],
)
def test_what_cannot_vote_is_said_in_one_sentence(seen, case, sentence):
    assert sentence in seen[f"refused {case}"] and "\n" not in seen[f"refused {case}"]
