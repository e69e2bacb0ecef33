"""Does the code of this tree train to the same bits as that of another commit?

    python benchmarks/same_bits.py REV              # any name that git knows: a commit, HEAD, main
    python benchmarks/same_bits.py --tree DIR       # another checkout instead
    python benchmarks/same_bits.py REV --smoke      # a handful of cases
    python benchmarks/same_bits.py REV --only cub   # the cases whose name contains the text

Every case runs with the source of both trees, each in processes of its own, and the parameters are
compared by SHA-256: after every step of an optimizer that is given made-up gradients, and at the
end of short runs of train.py. A case runs in several spreads of its 4 workers over processes, with
overlap and without, which must agree with each other too.

A vote cannot be zero, so what a worker says about a parameter of which it knows exactly nothing is
a choice, and choices change. The column "zero votes" tells in which cases some worker came to that:
it is measured, from gradients and momenta. ``--changed zero-votes`` expects that these cases differ
(see CHANGES for the others); they are shown, and the exit code is about the rest.

Exit codes: 0 all equal, 1 something differs, 2 wrong input. Writes nothing into the tree.
"""

import argparse
import gc
import hashlib
import importlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from rich.console import Console  # accelerator.py takes cases from here without rich

ROOT = Path(__file__).resolve().parents[1]
WORKERS = 4
DRIVE = "--drive"  # in a process of one tree, see drive
LOST = {"error": "did not end"}
CHANGES = {
    "zero-votes": "what a worker says by one bit about an entry it knows exactly nothing of",
    "equal-sizes": "which of entries of equal size graddrop and dgc send",
    "adamw-steps": "how g_adamw counts the steps of a parameter that no worker had a gradient of",
}

# ---- the cases ----------------------------------------------------------------------------------

# where defaults show nothing of a method in 6 steps of a few hundred parameters
SMALL: dict[str, dict[str, Any]] = {
    # not 0.9: short mantissas, as of bfloat16, often cancel to exactly 0 with it
    "signum_mavo": {"momentum": 0.937},
    "signum_avg": {"momentum": 0.937},
    "graddrop": {"density": 0.1},
    "dgc": {"density": 0.1, "warmup_steps": 2},
    "powersgd": {"rank": 2},
    "onebit_adam": {"warmup_steps": 2},
    "demo": {"chunk": 16, "topk": 4},
    "sparseloco": {"local_steps": 1, "chunk": 100, "topk": 9},
    "diloco": {"local_steps": 1},
    "muloco": {"local_steps": 1},
    # the default of earlier commits, slow as it is
    "g_muon": {"ns_precision": "bf16"},
    "muon_adm": {"ns_precision": "bf16"},
    "ef21_muon": {"ns_precision": "bf16"},
    "sign_muon_mavo": {"ns_precision": "bf16"},
    "sign_muon_avg": {"ns_precision": "bf16"},
}


def methods() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return class and settings of this tree's methods, by name.

    Rates are far above those that train well, so that every update reaches every bit.
    """
    from dlion.optim import METHODS

    rates = {"lr": 3e-2, "weight_decay": 0.1}
    return {
        name: (method.name, {**rates, **method.options, **SMALL.get(name, {})})
        for name, method in METHODS.items()
    }


# in a process of another tree, which may have other methods, :func:`drive` is given these
METHODS = methods() if sys.argv[1:] != [DRIVE] else {}

# none is a multiple of 64 elements, but head.weight is, and norm.scale has no dimension
SHAPES = {
    "embedding.weight": (37, 24),
    "block.weight": (65, 31),
    "block.bias": (65,),
    "norm.scale": (),
    "head.weight": (64, 16),
    "head.bias": (3,),
}
LARGE = {"embedding.weight": (401, 257), "head.bias": (999,)}  # messages too long to go at once

ALL_RUNS = [(processes, overlap) for processes in (1, 2, 4) for overlap in (False, True)]
SOME_RUNS = [(1, False), (2, True), (4, False)]
FEW_RUNS = [(1, False), (2, True)]


Run = tuple[int, bool]  # processes, overlap


@dataclass(frozen=True)
class Case:
    """An optimizer that is given made-up gradients.

    Attributes:
        method, options: a key of METHODS, and what differs from its settings there.
        runs: (processes, overlap) of each run.
        shapes: of the parameters, by name.
        bfloat16: every other parameter is of that dtype, else all are float32.
        groups: of parameters, each with rates of its own.
        lacking: ``some`` workers have no gradient of a parameter in some steps | ``all`` of them |
            some never have one (``never``) | "" all always have all.
        partial: only some workers take part in a step.
        changed: what may change it on purpose, a key of CHANGES; zero votes are measured.
    """

    name: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=lambda: FEW_RUNS)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)
    bfloat16: bool = False
    groups: int = 1
    lacking: str = ""
    partial: bool = False
    steps: int = 6
    changed: str = ""


@dataclass(frozen=True)
class TrainCase:
    """A run of train.py; ``runs`` are (processes, overlap)."""

    name: str
    overrides: list[str]
    runs: list[Run] = field(default_factory=lambda: [(1, False), (2, True)])
    changed: str = ""

    @property
    def method(self) -> str:
        return re.findall(r"optimizer=(\w+)", " ".join(self.overrides))[0]


def all_cases() -> list[Case | TrainCase]:
    cases: list[Case | TrainCase] = [Case(name, name, runs=ALL_RUNS) for name in METHODS]
    variants: dict[str, list[dict[str, Any]]] = {
        "dlion_mavo": [
            *({"ties": ties} for ties in ("zero", "plus", "alternate", "random")),
            *({"weighted": True, "ties": ties} for ties in ("previous", "random")),
        ],
        "signum_mavo": [{"ties": "zero"}, {"ties": "alternate"}, {"weighted": True}],
        "sign_muon_mavo": [
            {"local_polar": True},
            {"ties": "zero"},
            {"weighted": True},
            {"momentum_sync": 2},
        ],
        "sign_muon_avg": [{"rest": "adamw"}, {"local_polar": False}],
        "g_muon": [{"adjust_lr": "original", "ns_precision": "float32"}],
        "dion": [{"rank_fraction": 1 / 16, "adjust_lr": "original"}],
        "ef21_muon": [{"value_bits": 32}],
        "terngrad": [{"clip": 0.0}],
        "ef_signsgd": [{"momentum": 0.9}],
        "graddrop": [{"density": 1.0}],
        "dgc": [{"clip_norm": 5.0, "bucket_cap_mb": None}],
        "lion_cub": [
            *({"bits": bits} for bits in (1, 2, 8)),
            *({"scale": scale} for scale in ("max", "geometric")),
            *({"ties": ties} for ties in ("previous", "random")),
            {"momentum_sync": 2},
            {"momentum_sync": "exponential"},
            {"momentum_sync": 2, "sync_pattern": "embedding|bias"},
        ],
    }
    for method, settings in variants.items():
        for options in settings:
            name = " ".join([method, *(f"{key}={value}" for key, value in options.items())])
            cases.append(Case(name, method, options, SOME_RUNS))
    cases.append(
        Case("lion_cub momentum_sync=2, overlap", "lion_cub", {"momentum_sync": 2}, ALL_RUNS)
    )
    for method in METHODS:
        adamw = "adamw-steps" if method == "g_adamw" else ""
        equal = "equal-sizes" if method in ("graddrop", "dgc") else ""  # frequent in bfloat16
        cases += [
            Case(f"{method}, one bucket, two groups", method, {"bucket_cap_mb": None}, groups=2),
            Case(f"{method}, float32 and bfloat16", method, bfloat16=True, changed=equal),
            Case(f"{method}, some lack gradients", method, lacking="some"),
            Case(f"{method}, all lack gradients", method, lacking="all", changed=adamw),
            Case(f"{method}, some never have one", method, lacking="never"),
            Case(f"{method}, partial participation", method, partial=True),
            Case(f"{method}, nonfinite=skip", method, {"nonfinite": "skip"}),
        ]
    for method in ("g_lion", "graddrop", "dgc", "dlion_mavo"):
        cases.append(Case(f"{method}, large", method, shapes=LARGE, steps=2))
    return cases + train_cases()


def train_cases() -> list[TrainCase]:
    """The tied LLaMA and the ResNet meet no zero votes; biases of keys and dead pixels do."""
    text = ["dataset=stdlib_text", "dataset.max_bytes=400000", "batch_size=4", "steps=4"]
    llama = [*text, "model=llama_tiny", "+model.tie_word_embeddings=true"]
    digits = ["dataset=digits", "model=vit_tiny", "batch_size=8", "steps=5"]
    mnist = ["dataset=mnist5k", "model=vit_tiny", "batch_size=4", "steps=4"]
    images = ["dataset=mnist5k", "model=resnet18", "batch_size=8", "steps=2"]
    faults = ["faults.byzantine=1", "faults.drop=0.3", "participation=0.75"]
    one, both, two = [(1, False)], [(1, False), (2, True)], [(2, True)]

    def case(name: str, runs: list[Run], data: list[str], method: str, *more: str) -> TrainCase:
        return TrainCase(f"train.py {name}", [*data, f"optimizer={method}", *more], runs)

    return [
        case("llama dlion_mavo", both, llama, "dlion_mavo"),
        case("llama signum_avg local_steps=2", one, llama, "signum_avg", "local_steps=2"),
        case("llama dlion_mavo faults", two, llama, "dlion_mavo", *faults),
        case("llama lion_cub bits=1", two, llama, "lion_cub", "optimizer.bits=1", "accumulate=2"),
        case("resnet18 dlion_avg", two, images, "dlion_avg"),
        case("gpt dlion_mavo", both, text, "dlion_mavo"),
        case("gpt lion_cub bf16", two, text, "lion_cub", "precision=bf16"),
        case("digits terngrad", one, digits, "terngrad"),
        case("digits dlion_mavo bf16", two, digits, "dlion_mavo", "precision=bf16"),
        case("mnist5k signum_mavo", one, mnist, "signum_mavo"),
        case("mnist5k lion_cub", two, mnist, "lion_cub", "optimizer.momentum_sync=2"),
    ]


SMOKE = ("g_lion", "dlion_mavo", "terngrad", "dgc", "train.py gpt dlion_mavo")


# ---- in the processes of one tree ---------------------------------------------------------------


def drive() -> None:
    """Run the cases on standard input with the ``dlion`` of PYTHONPATH, a line of JSON a run.

    Only what DistributedOptimizer's users see is used, as this runs with old and new sources.
    """
    plan = json.load(sys.stdin)
    METHODS.update(plan["methods"])
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what else is printed goes to the log
    import torch

    import dlion.optim

    if not Path(dlion.optim.__file__).is_relative_to(Path.cwd() / "src"):
        raise RuntimeError(f"{dlion.optim.__file__} is not of this tree")
    torch.set_num_threads(1)
    scratch = Path(plan["scratch"])
    cases = [Case(**case) for case in plan["cases"]]
    trainings = [TrainCase(**case) for case in plan["train"]]
    _warm_up({case.method for case in [*cases, *trainings]})
    gc.freeze()  # what is shared with the forks is not looked through again
    for processes in (1, 2, 4):
        _fork(processes, _run_cases, processes, cases, scratch, lines)
    if trainings:
        import torch._dynamo

        if any("model=llama_tiny" in case.overrides for case in trainings):
            _import_models()
    for number, case in enumerate(trainings):
        for processes, overlap in case.runs:
            output = scratch / f"train-{number}-{processes}-{overlap}"
            marker = output.with_suffix(".zero")
            _fork(1, _train, [*case.overrides, *_spread_of(processes, overlap, output)], marker)
            summary = output / "summary.json"
            found = json.loads(summary.read_text()) if summary.exists() else {}
            if not found:
                said = output.with_suffix(".log").read_text().strip().splitlines()
                outcome = {"error": (said or ["train.py failed"])[-1]}
            else:
                outcome = {"hash": found["parameters_sha256"], "zero": marker.exists()}
            _report(lines, case.name, (processes, overlap), outcome)
            shutil.rmtree(output, ignore_errors=True)


# names that differ between revisions: here and nowhere else


def _set_participants(optimizer: Any, participants: list[int]) -> None:
    name = "set_participants" if hasattr(optimizer, "set_participants") else "attend"
    getattr(optimizer, name)(participants)


def _import_models() -> None:
    """What takes seconds to import, once for all runs."""
    for room in ("suite.data.", "data.", ""):
        with suppress(ImportError):
            importlib.import_module(f"dlion.{room}torchvision_ops").declare_missing_operators()
    import transformers.models.llama.modeling_llama  # noqa: F401


def _warm_up(methods: set[str]) -> None:
    """Compile kernels, or load them, for all processes; without threads, which forks do not like.

    A backward pass may start threads, so gradients are put in place by hand.
    """
    import torch

    from dlion import optim

    for class_name, settings in (METHODS[method] for method in sorted(methods)):
        for dtype in (torch.float32, torch.bfloat16):
            param = torch.nn.Parameter(torch.ones(8, 8, dtype=dtype))
            param.grad = torch.ones_like(param)
            if hasattr(optim, class_name):  # an earlier commit may lack it
                getattr(optim, class_name)([param], **settings).step()


def _fork(processes: int, work: Any, *args: Any) -> None:
    started = [get_context("fork").Process(target=work, args=(r, *args)) for r in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join()


def _report(lines: Any, case: str, run: Run, outcome: dict[str, Any]) -> None:
    lines.write(json.dumps({"case": case, "run": run, **outcome}) + "\n")
    lines.flush()


def _spread_of(processes: int, overlap: bool, output: Path) -> list[str]:
    return [
        f"workers={WORKERS}",
        f"processes={processes}",
        f"overlap={str(overlap).lower()}",
        "bucket_cap_mb=0.1",
        "logger=none",
        "dataset.validation=true",  # a small test
        "device=cpu",
        f"output_dir={output}",
    ]


def _train(rank: int, arguments: list[str], marker: Path) -> None:
    _watch_zero_votes(marker)
    log = os.open(marker.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["train.py", *arguments]
    runpy.run_path("train.py", run_name="__main__")


def _run_cases(rank: int, processes: int, cases: list[Case], scratch: Path, lines: Any) -> None:
    """The cases with so many processes, of which this is one; the first reports."""
    import torch.distributed as dist

    from dlion.workers import Workers

    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    runs = [(c, overlap) for c in cases for count, overlap in c.runs if count == processes]
    marker = scratch / f"zero-{processes}"
    _watch_zero_votes(marker)
    for number, (case, overlap) in enumerate(runs):
        if processes > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{scratch}/meet-{processes}-{number}",
                rank=rank,
                world_size=processes,
                timeout=timedelta(seconds=60),
            )
        try:
            digest = run_case(case, Workers.current(local=WORKERS // processes), overlap)
            everyone: list[Any] = [digest] * processes
            if processes > 1:
                dist.all_gather_object(everyone, digest)
            outcome = {"hash": digest, "zero": marker.exists()}
            if len(set(everyone)) > 1:
                outcome = {"error": "processes hold different parameters"}
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        if processes > 1:
            dist.destroy_process_group()
        if rank == 0:
            marker.unlink(missing_ok=True)
            _report(lines, case.name, (processes, overlap), outcome)


def run_case(
    case: Case, workers: Any, overlap: bool, device: str = "cpu", travelling: bool = False
) -> str:
    """The SHA-256 of all parameters after all steps.

    ``travelling``: one process, too, sends its messages through collectives.
    """
    import torch

    from dlion import optim

    params = {}
    for index, (name, shape) in enumerate(case.shapes.items()):
        dtype = torch.bfloat16 if case.bfloat16 and index % 2 else torch.float32
        generator = torch.Generator().manual_seed(index)
        values = torch.randn(shape, generator=generator).to(device, dtype)
        params[name] = torch.nn.Parameter(values)
    class_name, settings = METHODS[case.method]
    settings = {"bucket_cap_mb": 0.008, **settings, **case.options}
    pairs = list(params.items())
    groups = [{"params": pairs[i :: case.groups]} for i in range(case.groups)]
    for i, group in enumerate(groups[1:], 1):
        group |= {"lr": settings["lr"] / (1 + i), "weight_decay": 0.0}
    optimizer = getattr(optim, class_name)(
        groups, workers=workers, seed=3, overlap=overlap, **settings
    )
    if travelling:
        optimizer.channel.alone = False
    digest = hashlib.sha256()
    for step in range(case.steps):
        participants = list(range(WORKERS))
        if case.partial:
            participants = [[0, 2, 3], [1], [0, 1, 2, 3], [1, 3]][step % 4]
            _set_participants(optimizer, participants)
        for i, worker in enumerate(workers.ids):
            if worker in participants:
                _backward(case, list(params.values()), step, worker)
                optimizer.collect(i)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        for param in params.values():
            digest.update(param.detach().flatten().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def _backward(case: Case, params: list[Any], step: int, worker: int) -> None:
    """Accumulate a worker's gradients as a backward pass does, hooks included."""
    import torch

    given = [i for i in range(len(params)) if not _lacks(case.lacking, step, worker, i)]
    grads = [_gradient(step, worker, i, params[i].shape, params[i].dtype).clone() for i in given]
    if case.options.get("nonfinite") == "skip" and (step, worker) in ((2, 1), (3, 1), (3, 2)):
        grads[worker].view(-1)[-1] = torch.inf if step == 2 else torch.nan
    grads = [grad.to(params[0].device) for grad in grads]
    torch.autograd.backward([params[i] for i in given], grads)


def _lacks(lacking: str, step: int, worker: int, index: int) -> bool:
    """Whether a worker has no gradient of a parameter; from the start only if it ``never`` has."""
    if lacking == "never":
        return index == 1 and worker != 2
    return (
        bool(lacking)
        and step in (2, 3, 5)
        and index in (0, 3)
        and (lacking == "all" or worker % 2 == 0)
    )


@cache
def _gradient(step: int, worker: int, index: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """What all workers see and what one sees by itself; no entry is exactly zero."""
    import torch

    def draw(who: int) -> Any:
        seed = (step * 1000 + who) * 1000 + index + 7
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    grad = (10.0**-index * (draw(WORKERS) + 2 * draw(worker))).to(dtype)
    return grad.where(grad != 0, 10.0**-index)


def _watch_zero_votes(marker: Path) -> None:
    """Create the file ``marker`` as soon as a worker's direction is exactly 0 anywhere.

    In methods that send signs alone, which cannot tell it. The momenta are kept here once more:
    those of the optimizer have moved on already where messages left early.
    """
    import torch

    from dlion.optim import DistributedOptimizer

    collect = DistributedOptimizer.collect
    momenta: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    def watched(self: Any, worker: int) -> None:
        if type(self).__name__ in ("DLion", "Signum") or getattr(self, "bits", None) == 1:
            kept = momenta.setdefault(self, {})
            for group in self.param_groups:
                betas = group.get("betas") or (group["momentum"],) * 2
                for param in group["params"]:
                    grad, key = param.grad, (worker, param)
                    momentum = kept.setdefault(key, torch.zeros(param.shape))
                    direction = momentum * betas[0]
                    found = getattr(self, "options", vars(self)).get("nonfinite", "stop")
                    if grad is not None and (grad.isfinite().all() or not found):
                        direction += grad.float() * (1 - betas[0])
                        momentum.mul_(betas[1]).add_(grad.float() * (1 - betas[1]))
                    if (direction == 0).any():
                        marker.touch()
        collect(self, worker)

    DistributedOptimizer.collect = watched


# ---- the comparison -----------------------------------------------------------------------------


Outcome = dict[str, Any]  # hash and zero (votes), or error
Outcomes = dict[tuple[str, int, bool], Outcome]  # by case, processes and overlap


@contextmanager
def checkout(rev: str) -> Iterator[Path]:
    """A worktree of a commit, which is gone afterwards, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="same-bits-") as directory:
        tree = Path(directory) / "tree"
        command = ["git", "-C", str(ROOT), "worktree", "add", "--quiet", "--detach", str(tree), rev]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["git failed"])[-1]
                raise WrongInput(
                    f"{rev} cannot be checked out ({reason}): name a commit, or --tree"
                )
            yield tree
        finally:
            remove = ["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)]
            subprocess.run(remove, capture_output=True)


class WrongInput(ValueError):
    """What the person at the keyboard can mend."""


def run_tree(tree: Path, cases: list[Case | TrainCase], report: Callable[[str], None]) -> Outcomes:
    """Run the cases with the source of a tree; ``report`` is called with the name of each run."""
    outcomes: Outcomes = {}
    with tempfile.TemporaryDirectory(prefix="same-bits-") as scratch:
        plan = {
            "scratch": scratch,
            "methods": METHODS,
            "cases": [asdict(case) for case in cases if isinstance(case, Case)],
            "train": [asdict(case) for case in cases if isinstance(case, TrainCase)],
        }
        log = Path(scratch) / "log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).resolve()), DRIVE],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
            try:
                process.stdin.write(json.dumps(plan))
                process.stdin.close()
                for line in process.stdout:
                    outcome = json.loads(line)
                    case, run = outcome.pop("case"), outcome.pop("run")
                    outcomes[case, *run] = outcome
                    report(case)
                failed = process.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its workers too
                process.wait()
        if failed:
            sys.stderr.write("".join(log.read_text().splitlines(keepends=True)[-20:]))
    return outcomes


def compare(case: Case | TrainCase, there: Outcomes, here: Outcomes) -> list[str]:
    """What is not as it should be, a line each: nothing, if all is equal."""
    lines = []
    for processes, overlap in case.runs:
        outcomes = [tree.get((case.name, processes, overlap), LOST) for tree in (there, here)]
        errors = [f"{o['error']}" for o in outcomes if "error" in o]
        if errors:
            lines.append(f"{_run_name(processes, overlap)}: {errors[0]}")
        elif outcomes[0]["hash"] != outcomes[1]["hash"]:
            before, after = (o["hash"][:8] for o in outcomes)
            lines.append(f"{_run_name(processes, overlap)}: {before} {after}")
    if lines:
        return lines
    hashes = {_run_name(*run): here[case.name, *run]["hash"][:8] for run in case.runs}
    if len(set(hashes.values())) > 1:
        return [f"{run}: {digest}, in both trees" for run, digest in hashes.items()]
    return []


def _run_name(processes: int, overlap: bool) -> str:
    return f"{processes}x{WORKERS // processes}" + (" overlap" if overlap else "")


def show(
    cases: list[Case | TrainCase],
    there: Outcomes,
    here: Outcomes,
    changed: set[str],
    console: "Console",
) -> int:
    """Print the table; returns how many cases differ that should not."""
    from rich.table import Table

    table = Table("case", "runs", "may differ after", "result", box=None, pad_edge=False)
    wrong = 0
    for case in cases:
        votes = any(
            tree.get((case.name, *run), {}).get("zero")
            for tree in (there, here)
            for run in case.runs
        )
        reasons = {case.changed} if case.changed else {"zero-votes"} if votes else set()
        lines = compare(case, there, here)
        expected = bool(reasons & changed)
        wrong += bool(lines) and not expected
        result = "equal " + here[case.name, *case.runs[0]]["hash"][:8] if not lines else ""
        if lines:
            result = "\n".join(["different, as expected" if expected else "DIFFERENT", *lines])
        table.add_row(case.name, str(len(case.runs)), ", ".join(reasons), result)
    console.print(table)
    return wrong


def known_to(tree: Path, cases: list[Case | TrainCase]) -> tuple[list[Case | TrainCase], list[str]]:
    """Return the cases whose method a tree has, and the methods of the others."""
    there = {file.stem for file in (tree / "conf" / "optimizer").glob("*.yaml")}
    unknown = {case.method for case in cases} - there
    return [case for case in cases if case.method in there], sorted(unknown)


def main(argv: list[str] | None = None) -> int:
    from rich.console import Console
    from rich.progress import Progress

    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="; ".join(f"{name}: {what}" for name, what in CHANGES.items()),
    )
    parser.add_argument("rev", nargs="?", help="the commit to compare this tree with")
    parser.add_argument("--tree", type=Path, help="a checkout to compare with, instead")
    parser.add_argument("--smoke", action="store_true", help="a handful of cases")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains it")
    parser.add_argument(
        "--changed", nargs="+", default=[], choices=CHANGES, help="what changed on purpose since"
    )
    args = parser.parse_args(argv)
    if (args.rev is None) == (args.tree is None):
        parser.error("give either a commit to compare with or --tree DIR")
    if args.tree and not (args.tree / "src" / "dlion").is_dir():
        parser.error(f"--tree {args.tree} holds no src/dlion: give the root of a checkout")
    cases = [case for case in all_cases() if args.only in case.name]
    if args.smoke:
        cases = [case for case in cases if case.name in SMOKE]
    if not cases:
        parser.error(f"--only {args.only}: no case has that in its name")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console, start = Console(), time.monotonic()
    progress = Progress(
        *Progress.get_default_columns(), console=Console(stderr=True), transient=True
    )
    try:
        with nullcontext(args.tree) if args.tree else checkout(args.rev) as other, progress:
            cases, unknown = known_to(other, cases)
            if not cases:
                raise WrongInput(f"{args.only}: the other tree knows none of these methods")
            runs = sum(len(case.runs) for case in cases)
            task = progress.add_task("", total=2 * runs)

            def report(case: str) -> None:
                progress.update(task, advance=1, description=case)

            there = run_tree(other.resolve(), cases, report)
            here = run_tree(ROOT, cases, report)
    except WrongInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    wrong = show(cases, there, here, set(args.changed), console)
    seconds = time.monotonic() - start
    verdict = (
        f"{wrong} of {len(cases)} cases differ" if wrong else f"all {len(cases)} cases are equal"
    )
    if args.changed and not wrong:
        verdict += ", but for what was changed"
    console.print(f"{verdict}; {runs} runs of each tree in {seconds:.0f} s")
    if unknown:
        console.print(f"left out, as the other tree has no such method: {', '.join(unknown)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:] == [DRIVE]:
        drive()
    else:
        sys.exit(main())
