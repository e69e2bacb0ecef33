"""What is proved of adaptive delta modulation, and what is not, on signals that nobody reacts to.

    python benchmarks/delta_theory.py

Drives the coder of dlion_adm, as it is, with constants, jumps, ramps, noise and changing scales,
for several rises, and compares workers' estimates with the sum that the owner keeps. Prints tables;
nothing is timed.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from common import ROOT, Parser, Row, run
from torch import Tensor

from dlion import kernels
from dlion.exchange.delta import DORMANT
from dlion.kernels import Coder, nearest_level, step_size
from dlion.suite.arguments import whole
from dlion.suite.files import write_atomically
from dlion.suite.machine import machine
from dlion.suite.record.provenance import commit

RISES = (2, 3, 4)
MANY = 1024  # coordinates
Values = dict[str, float | str]


class Modulator:
    """n workers that say what they are given, d numbers each, and the owner who listens.

    Attributes:
        coder: of all workers, one after the other: ``[n * d]``.
        owner: ``estimate`` is the workers' sum.
    """

    def __init__(self, rise: int, n: int = 1, d: int = MANY, level: int | Tensor = DORMANT) -> None:
        self.rise, self.n, words = rise, n, d // 64
        levels = torch.zeros(n, d, dtype=torch.uint8) + torch.as_tensor(level, dtype=torch.uint8)
        history = torch.zeros(2, n * words, dtype=torch.int64)
        self.coder = Coder(torch.zeros(n * d), levels.flatten(), history)
        history = torch.zeros(n, 2, words, dtype=torch.int64)
        self.owner = Coder(torch.zeros(1, d), levels.clone(), history)
        self._message = torch.zeros(n, 1, words, dtype=torch.int64)
        self._momentum = torch.zeros(n * d)
        self._masks = torch.zeros(2, words, dtype=torch.int64)

    @property
    def estimate(self) -> Tensor:
        """What is thought of each worker, ``[n, d]``."""
        return self.coder.estimate.view(self.n, -1)

    @property
    def step(self) -> Tensor:
        """The latest steps, ``[n, d]``."""
        return step_size(self.coder.level).view(self.n, -1)

    def say(self, truth: Tensor) -> Tensor:
        """Send a bit of each of ``[n, d]``; return them as -1 and 1."""
        truth = truth.expand(self.n, -1).contiguous()
        bits = torch.where(truth >= self.estimate, 1.0, -1.0)
        parts = self._message, self._momentum, kernels.Gradients.of(truth.flatten()), self.coder
        kernels.encode_deltas(*parts, 0.0, 0.0, self.rise)  # with these momenta it is the gradient
        return bits

    def listen(self) -> None:
        """Let the owner follow what was sent."""
        rows = torch.arange(self.n)
        kernels.decode_deltas(self._message, rows, self.owner, None, self.rise, 0.0, *self._masks)


def constants(args: argparse.Namespace, rise: int) -> Iterator[Row]:
    """Follow constants of all sizes from one start: runs, and how the step falls."""
    truth, coder = sizes(1e-6, 1e-1), Modulator(rise)
    last, fine = -torch.ones(1, MANY), torch.ones(1, MANY, dtype=torch.bool)
    met, length, longest, start, above, beyond = torch.zeros(6, 1, MANY)
    for step in range(1, 801):
        bit, level = coder.say(truth), coder.coder.level.view(1, -1).float()
        length = torch.where(bit == last, length + 1, 1)
        meets = (met == 0) & (bit != last) & (bit * truth < 0)
        met, start = torch.where(meets, step, met), torch.where(meets, level, start)
        fine &= coder.step > 2.0**-22 * truth.abs()  # float32 has no more digits than that
        counts = fine & (met > 0)
        longest = torch.where(counts, torch.maximum(longest, length), longest)
        excess = level - (start - ((step - met) / 2).floor()).clamp(min=0)
        above = torch.where(counts, torch.maximum(above, excess), above)
        beyond = torch.maximum(beyond, (coder.estimate / truth - 1))
        last = bit
    least = step_size(torch.zeros(1, dtype=torch.uint8)).maximum(2.0**-22 * truth.abs())
    yield {
        "steps until met, most": met.max().item(),
        "overshoot of the way, most": beyond.max().item(),
        "bits in a later run, most": longest.max().item(),
        "levels above the bound, most": above.max().item(),
        "error after 800 steps over what is possible": (
            ((coder.estimate - truth).abs() / least).max().item()
        ),
    }


def jumps(args: argparse.Namespace, rise: int) -> Iterator[Row]:
    """Climb to constants that are far above the first step."""
    for ratio in (1e1, 1e3, 1e6):
        start = 100
        truth = step_size(torch.tensor([start], dtype=torch.uint8)) * ratio
        truth = truth * torch.logspace(-0.5, 0.5, MANY).unsqueeze(0)
        coder, met, most = Modulator(rise, level=start), torch.zeros(1, MANY), torch.zeros(1, MANY)
        for step in range(1, 300):
            coder.say(truth)
            over = coder.estimate >= truth
            met = torch.where(over & (met == 0), step, met)
            most = torch.where(met == step, (coder.estimate - truth) / truth, most)
        growth = 2 ** (rise / 8)
        formula = 2 + math.log(1 + ratio * (growth - 1) / growth, growth)
        yield {
            "way over first step": f"{ratio:g}",
            "steps, mean": met.mean().item(),
            "by the formula": formula,
            "overshoot, mean": most.mean().item(),
            "overshoot, most": most.max().item(),
        }


def rates(args: argparse.Namespace, rise: int) -> Iterator[Row]:
    """Follow what moves by at most delta a step, in units of delta."""
    delta, steps = 1e-4, 4000
    signs = random_signs(steps)
    paths: dict[str, Callable[[int], Tensor | float]] = {
        "ramp": lambda step: 1.0,
        "random walk": lambda step: signs[step],
        "400 steps of rest, 400 of ramp": lambda step: float(step // 400 % 2),
        "ramp, back every 100": lambda step: 1.0 - 2.0 * (step // 100 % 2),
    }
    for name, path in paths.items():
        truth, coder = sizes(1e-6, 1e-3), Modulator(rise)
        squares, worst, largest = 0.0, 0.0, 0.0
        for step in range(steps):
            truth = truth + delta * path(step)
            coder.say(truth)
            if step >= 400:
                error = (coder.estimate - truth) / delta
                squares += error.square().mean().item() / (steps - 400)
                worst = max(worst, error.abs().max().item())
                largest = max(largest, coder.step.max().item() / delta)
        yield {"signal": name, "rms": squares**0.5, "worst": worst, "largest step": largest}


def noises(args: argparse.Namespace, rise: int) -> Iterator[Row]:
    """Follow noise of deviation 1 around 0: white, and what Lion makes of white gradients."""
    for name, betas in {"white": None, "0.9, 0.99": (0.9, 0.99), "0.7, 0.8": (0.7, 0.8)}.items():
        random = torch.Generator().manual_seed(0)
        scale, m = 1e-3, torch.zeros(1, MANY)
        coder = Modulator(rise, level=nearest_level(torch.tensor([0.1 * scale])).item())
        steps, kept, total, squares = args.steps, [], 0.0, torch.zeros(5)
        before, equal = torch.zeros(1, MANY), 0.0
        for step in range(steps):
            u = scale * torch.randn(1, MANY, generator=random)
            if betas:
                g, (beta1, beta2) = u, betas
                u, m = beta1 * m + (1 - beta1) * g, beta2 * m + (1 - beta2) * g
            bit = coder.say(u)
            if step >= steps // 2:
                total += u.square().mean().item()
                ahead = coder.step * bit
                tries = [coder.estimate - u + c * ahead for c in (0, 0.5, 1, 2)]
                squares += torch.stack([e.square().mean() for e in (coder.estimate, *tries)])
                equal += (bit == before).float().mean().item() / (steps - steps // 2)
                if step % max(1, steps // 100) == 0:
                    kept.append(coder.step.flatten())
            before = bit
        size = (total / (steps - steps // 2)) ** 0.5
        quantiles = torch.cat(kept).quantile(torch.tensor([0.1, 0.5, 0.9])) / size
        low, middle, high = quantiles.tolist()
        around, *errors = (squares / total).tolist()
        yield {
            "signal": name,
            **{"step 10 %": low, "50 %": middle, "90 %": high, "equal bits": equal},
            "E h^2": around,
            **{f"E (u - h), c = {c}": e for c, e in zip((0, 0.5, 1, 2), errors, strict=True)},
        }


def crowds(args: argparse.Namespace, rise: int) -> Iterator[Row]:
    """Compare the error of the mean of 16 workers with that of one; 0.25 is independence."""
    n, random = 16, torch.Generator().manual_seed(0)
    same, one = sizes(1e-3, 1e-2), torch.ones(n, 1)
    unlike = same * torch.randn(n, MANY, generator=random)
    spread = (torch.arange(n) % 8).unsqueeze(1) + DORMANT
    cases = {
        "equal constants": (same * one, 0.0, DORMANT, 160),
        "equal constants, starts spread over an octave": (same * one, 0.0, spread, 160),
        "equal constants, noise of 1 % each": (same * one, 0.01, DORMANT, 400),
        "equal constants, noise of 100 % each": (same * one, 1.0, DORMANT, 400),
        "unlike constants": (unlike, 0.0, DORMANT, 160),
    }
    for name, (truth, noise, level, steps) in cases.items():
        coder, single, mean = Modulator(rise, n, level=level), 0.0, 0.0
        for step in range(steps):
            u = truth
            if noise:
                u = truth + noise * truth.abs() * torch.randn(n, MANY, generator=random)
            coder.say(u)
            if step >= steps - 60:  # silent ones are not yet at the floor
                relative = (coder.estimate - u) / coder.step.mean(0)
                single += relative.square().mean().item()
                mean += relative.mean(0).square().mean().item()
        yield {"workers": name, "mean over one": (mean / single) ** 0.5}


def drifts(args: argparse.Namespace, rise: int) -> Iterator[Row]:
    """Compare the owner's float32 sum with the sum of what 8 workers keep, after many steps."""
    for name, decades in {"as large at the end": 0.0, "10,000 times smaller": 4.0}.items():
        n, d, random = 8, 256, torch.Generator().manual_seed(0)
        coder, mean = Modulator(rise, n, d), torch.randn(n, d, generator=random)
        for step in range(args.long):
            scale = 1e-2 * 10 ** (-decades * step / args.long)
            coder.say(scale * (mean + torch.randn(n, d, generator=random)))
            coder.listen()
        exact = coder.estimate.double().sum(0)
        size = scale * mean.double().sum(0).square().mean().sqrt()
        gap = (coder.owner.estimate[0].double() - exact).abs().max()
        assert torch.equal(coder.owner.level.flatten(), coder.coder.level)
        error = (exact - scale * mean.double().sum(0)).square().mean().sqrt()
        yield {
            "gradients": name,
            "steps": args.long,
            "gap over truth, most": (gap / size).item(),
            "tracking error over truth": (error / size).item(),
        }


def scales(args: argparse.Namespace, rise: int) -> Iterator[Row]:
    """Count the steps until a signal is followed again whose scale has jumped."""
    for decades in (1, 2, 4, -1, -2, -4):
        random, signs = torch.Generator().manual_seed(0), random_signs(1)[0]
        start = 1e-3 if decades < 0 else 1e-6
        coder, errors = Modulator(rise), []
        for step in range(2000):
            scale = start * (10.0**decades if step >= 1000 else 1)
            u = scale * signs * (1 + 0.5 * torch.randn(1, MANY, generator=random))
            coder.say(u)
            errors.append(((coder.estimate - u).square().mean().sqrt() / scale).item())
        usual = sum(errors[-500:]) / 500
        late = max(i for i, e in enumerate([math.inf, *errors[1000:1500]]) if e > 1.25 * usual)
        yield {"factor": f"1e{decades}", "steps until followed": late, "usual error": usual}


CHECKS = {
    "constants": constants,
    "jumps": jumps,
    "rates": rates,
    "noise": noises,
    "workers": crowds,
    "float32": drifts,
    "scales": scales,
}


def sizes(least: float, most: float) -> Tensor:
    """Return numbers of both signs and sizes in a range, ``[1, MANY]``."""
    random = torch.Generator().manual_seed(1)
    exponent = torch.rand(1, MANY, generator=random) * math.log(most / least)
    return least * exponent.exp() * random_signs(1)[0]


def random_signs(rows: int) -> Tensor:
    """Return -1 and 1 at random, ``[rows, 1, MANY]``."""
    random = torch.Generator().manual_seed(2)
    return torch.randint(0, 2, (rows, 1, MANY), generator=random) * 2.0 - 1


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = Parser(__doc__, output=ROOT / "results" / "delta_modulation")
    parser.add_argument("--steps", type=whole(10), default=10_000, help="of noise")
    parser.add_argument("--long", type=whole(10), default=100_000, help="steps to drift for")
    return parser.read(arguments, steps=20, long=20)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rows, rises = [], RISES[:1] if args.smoke else RISES
    for name, check in CHECKS.items():
        found = [{"rise": rise, **row} for rise in rises for row in check(args, rise)]
        print(f"\n{name}: {(check.__doc__ or '').rstrip('.')}\n")
        print(f"| {' | '.join(found[0])} |\n|{' --- |' * len(found[0])}")
        for row in found:
            cells = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values())
            print(f"| {' | '.join(cells)} |", flush=True)
        rows += [{"check": name, **row} for row in found]
    facts = {"machine": machine("cpu"), "commit": commit()}
    write_atomically(
        args.output / "delta_theory.json", json.dumps({**facts, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    arguments = parse()
    run(main, arguments)
