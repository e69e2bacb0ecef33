"""Muon on the mean gradient: orthogonalised momenta for matrices, AdamW for the rest."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlion.checks import check_matches, check_pattern, warn
from dlion.core.bucket import Bucket, Names
from dlion.core.layout import Member, Slot, members_of
from dlion.core.optimizer import Common, DistributedOptimizer
from dlion.methods.dense import MeanGradientOptimizer
from dlion.methods.matrices import Matrices, are_matrices, is_hidden, tensors_of
from dlion.methods.momentum import nesterov_direction
from dlion.methods.updates import adamw_descent, wide
from dlion.values import Betas, Depth, Name, NotNegative, Probability

QUINTIC = 3.4445, -4.7750, 2.0315
POLAR_EXPRESS = (  # arXiv 2505.16932, Algorithm 1: for singular values of 0.001 to 1
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
LIMIT = 1.875, -1.25, 0.375  # of all further iterations
SAFETY = 1.01  # rounding may leave singular values so much too large
RMS = 0.2  # of AdamW's steps at the same rate
SMALLEST_NORM = 1e-7
# of products of batches: with fewer rows their bits depend on the size of a batch on some CPUs
BATCHED_ROWS, BATCHED_ELEMENTS = 16, 2**20

_GIVE = "give dlion.param_groups(model), which looks at the modules, or groups with use_muon"

AdjustLR = Literal["match_rms_adamw", "original"]
Precision = Literal["auto", "bf16", "float32"]
Coefficients = Literal["quintic", "polar_express"]


class NewtonSchulz(NamedTuple):
    """Settings of the iteration that brings singular values near 1, see :class:`GMuon`."""

    steps: int
    precision: Precision = "auto"
    coefficients: Coefficients = "quintic"

    @property
    def margin(self) -> float:
        """How much larger than a matrix its norm is taken to be."""
        return SAFETY if self.coefficients == "polar_express" else 1.0

    @property
    def polynomials(self) -> list[tuple[float, float, float]]:
        """(a, b, c) of each iteration."""
        if self.coefficients == "quintic":
            return [QUINTIC] * self.steps
        safe = [(a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in POLAR_EXPRESS]
        return (safe + [LIMIT] * self.steps)[: self.steps]


class MatricesApart(DistributedOptimizer):
    """An optimizer with one method for matrices of hidden layers and another for the rest.

    ``bucket.kind`` says how the parameters of a bucket hold such matrices; None: they hold none.
    """

    _orthogonalises = True

    def __init__(self, params: Iterable[Any], *, adamw_names: str | None, **options: Any):
        check_pattern("adamw_names", adamw_names)
        self.adamw_names = adamw_names
        super().__init__(params, **options)
        check_matches("adamw_names", adamw_names, self.param_groups)
        if self._orthogonalises:
            self._check_guesses([*members_of(self.param_groups)])

    def _check_guesses(self, members: list[Member]) -> None:
        """Say which matrices were guessed from names, and refuse to guess that there are none."""
        guessed = [member for member in members if member.group.get("use_muon") is None]
        hidden = [member for member in members if self.kind(member)]
        if guessed and not hidden:
            raise ValueError(
                f"none of {len(members)} parameters seems to be a matrix of a hidden layer, which"
                f" {type(self).__name__} is for: {_GIVE}, or choose another method"
            )
        # all of a model's, not a list of matrices
        if self.adamw_names is None and any(member.tensor.dim() < 2 for member in guessed):
            rest = [m.name for m in guessed if m.tensor.dim() > 1 and not self.kind(m)]
            left = f"all but {', '.join(rest[:5])}{', ...' * (len(rest) > 5)}" if rest else "all"
            warn(
                f"which matrices are embeddings or heads was guessed from names: {left} are"
                f" orthogonalised ({len(hidden)}): {_GIVE}"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; a group's ``use_muon`` has no effect after its buckets are made."""
        asked = param_group.get("use_muon") if isinstance(param_group, dict) else None
        if asked is not None and not isinstance(asked, bool):
            raise ValueError(f"use_muon={asked} is not possible: give True or False")
        super().add_param_group(param_group)

    def kind(self, member: Member) -> Matrices | None:
        asked = member.group.get("use_muon")
        if asked is None:
            chosen = is_hidden(member.name, self.adamw_names)
        else:
            chosen = asked and not re.search(self.adamw_names or "(?!)", member.name)
        shape = member.tensor.shape
        if not chosen or len(shape) < 2:
            return None
        matrices = Matrices.of(member.group, member.name, shape)
        shapes = matrices.shapes(shape)
        if isinstance(member.tensor, DTensor) and len({*shapes}) > 1:
            raise ValueError(
                f"split={matrices.split} makes matrices of several sizes, and FSDP has sharded"
                " these: give a number of equal parts"
            )
        return matrices if are_matrices(shapes) else None


class BesideAdamW(MatricesApart, MeanGradientOptimizer):
    """A method for matrices, with AdamW on the mean gradient for the rest.

    A subclass fills in ``matrix_state``, and overrides for buckets of matrices (``bucket.kind``)
    ``update`` and, where not their mean gradient travels, ``make_exchange`` and ``encode``.
    """

    shared_state = ["exp_avg", "exp_avg_sq"]
    counters = ["step"]
    needs_full_matrices = True
    matrix_state: ClassVar[Names]

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative,
        momentum: Probability,
        betas: Betas,
        eps: NotNegative,
        weight_decay: NotNegative,
        adamw_names: Name | None,
        **common: Unpack[Common],
    ):
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "use_muon": None,
        }
        super().__init__(params, defaults=defaults, adamw_names=adamw_names, **common)

    def state_names(self, bucket: Bucket) -> Any:
        return self.matrix_state if bucket.kind else self

    def update(self, bucket: Bucket) -> None:
        adamw_descent(bucket, bucket.exchange.decode())


class GMuon(BesideAdamW):
    """Global Muon: torch.optim.Muon on the mean gradient of all workers, AdamW where it is no use.

    For matrices, g the mean gradient: ``m <- mu m + (1 - mu) g``, ``O = NS(mu m + (1 - mu) g)``,
    ``x <- (1 - lr wd) x - lr s O``. NS brings all singular values near 1 (0.7 to 1.2):
    ``X = G / |G|``, then ``ns_steps`` times ``X <- a X + (b A + c A A) X`` with ``A = X X^T`` and
    (a, b, c) = (3.4445, -4.775, 2.0315). With R rows and C columns s is ``0.2 sqrt(max(R, C))``
    (``match_rms_adamw``: entries move about as far as under AdamW, which so takes the same rate and
    decay) or ``sqrt(max(1, R / C))`` (``original``). Convolutions are matrices [out, rest].
    Stacked experts are a matrix each.

    With ``ns_coefficients=polar_express`` each iteration has coefficients of its own, and
    ``X = G / (1.01 |G|)`` (Amsel et al. 2025, arXiv 2505.16932, Algorithm 1): singular values come
    nearer to 1.
    Source: Jordan et al. 2024 (kellerjordan.github.io/posts/muon), with mu 0.95 and 5 iterations;
    ``match_rms_adamw`` is of Liu et al. 2025 (arXiv 2502.16982). With
    ``ns_precision=bf16`` it is torch.optim.Muon bit for bit on a CPU.
    The first authors' code adds to the norm 1e-7, which is its least value here, and takes R and C
    of a convolution from the height and width of its kernel.

    Muon is for hidden layers. Vectors are AdamW's, as in :class:`GAdamW`, also as one row or column
    of a matrix, and so are embeddings (of tokens, positions, patches), output heads and depthwise
    convolutions. ``dlion.param_groups(model)`` knows these by their modules, and a parameter group
    says it with ``use_muon``: with True all its matrices are Muon's, with False none. It may also
    say that parameters of three dimensions are ``stacked`` matrices, that matrices are
    ``transposed``, [in, out], or ``split``, several fused. Of parameters without such a group the
    usual names of embeddings and heads tell, and a warning says what they told. The first
    convolution of a ResNet is Muon's, too. Other rates for the rest can be set in its group.

    Memory: 4 bytes of state a parameter of a matrix, 8 of the others.

    When not to use it: to train on a slow link, as it sends what :class:`GAdamW` sends; it is the
    quality that compressed methods are compared with. All processes orthogonalise by themselves,
    and get the same bits on one kind of machine with one number of threads only.

    Args:
        lr: learning rate, with ``match_rms_adamw`` AdamW's, with ``original`` about 0.02 for
            matrices.
        momentum: of matrices.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: decoupled.
        adjust_lr: s, the scale of a matrix: with match_rms_adamw AdamW's rates and decay fit.
        ns_steps: Newton-Schulz iterations.
        ns_precision: what they are computed in: bf16, as torch.optim.Muon, float32, or auto: bf16
            on a GPU and float32 on a CPU, where bf16 takes up to 45 times as long.
        ns_coefficients: quintic, one polynomial for all iterations, or polar_express.
        adamw_names: a regular expression: matrices whose name contains it are AdamW's. Without
            ``use_muon`` it takes the place of the usual names of embeddings and heads.
    """

    matrix_state = Names(shared_state=["momentum_buffer"])

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-3,
        momentum: Probability = 0.95,
        betas: Betas = (0.9, 0.999),
        eps: NotNegative = 1e-8,
        weight_decay: NotNegative = 0.1,
        adjust_lr: AdjustLR = "match_rms_adamw",
        ns_steps: Depth = 5,
        ns_precision: Precision = "auto",
        ns_coefficients: Coefficients = "quintic",
        adamw_names: Name | None = None,
        **common: Unpack[Common],
    ):
        self.adjust_lr = adjust_lr
        self.newton_schulz = NewtonSchulz(ns_steps, ns_precision, ns_coefficients)
        super().__init__(params, lr, momentum, betas, eps, weight_decay, adamw_names, **common)

    def update(self, bucket: Bucket) -> None:
        if not bucket.kind:
            super().update(bucket)
            return
        mean, momentum = bucket.exchange.decode(), bucket.shared["momentum_buffer"]
        direction = nesterov_direction(bucket, momentum, mean)
        scale = rms_scale if self.adjust_lr == "match_rms_adamw" else shape_scale
        orthogonal = bucket_orthogonalise(bucket, direction, self.newton_schulz)
        matrix_descent(bucket, orthogonal, scale)


def matrix_descent(bucket: Bucket, answer: Tensor, scale: Callable[[int, int], float]) -> None:
    """``x <- (1 - lr wd) x - lr s A`` of matrices, with s of their rows and columns."""
    with wide(bucket.params) as params:
        for slot, group in zip(bucket.slots, bucket.groups, strict=True):
            x, lr = slot.view(params), group["lr"]
            x.mul_(1 - lr * group["weight_decay"])
            for part, step, factor in scaled(bucket, slot, (x, slot.view(answer)), scale):
                part.add_(step, alpha=-lr * factor)


def scaled(
    bucket: Bucket, slot: Slot, tensors: Sequence[Tensor], scale: Callable[[int, int], float]
) -> Iterator[tuple[Any, ...]]:
    """Yield views of tensors in a parameter's shape, and the scale of the matrices in them.

    That is all of the parameter, unless it holds matrices of several shapes.
    """
    shapes = bucket.kind.shapes(slot.tensor.shape)
    if len({*shapes}) == 1:
        yield *tensors, scale(*shapes[0])
        return
    views = zip(*(bucket.kind.views(tensor) for tensor in tensors), strict=True)
    for parts, shape in zip(views, shapes, strict=True):
        yield *parts, scale(*shape)


def rms_scale(rows: int, columns: int) -> float:
    """Return the factor that gives an orthogonal matrix entries of RMS 0.2, as AdamW's steps."""
    return RMS * math.sqrt(max(rows, columns))


def shape_scale(rows: int, columns: int) -> float:
    """Return the factor of the first authors of Muon."""
    return math.sqrt(max(1, rows / columns))


def bucket_orthogonalise(bucket: Bucket, flat: Tensor, newton_schulz: NewtonSchulz) -> Tensor:
    """Newton-Schulz of the matrices of a bucket: float32 ``[padded]`` -> ``[padded]``.

    Matrices that FSDP2 has sharded are gathered, each on one process of the shard group.
    """
    whole = bucket.full.gather(flat)
    slots, answer = bucket.full.slots, torch.zeros_like(whole)
    targets, tensors = (
        tensors_of(slots, [flat] * len(slots), bucket.kind) for flat in (answer, whole)
    )
    orthogonalise_to(targets, tensors, newton_schulz)
    return bucket.scatter(answer)


def orthogonalise_to(
    targets: Iterable[Tensor], tensors: Sequence[Tensor], newton_schulz: NewtonSchulz
) -> None:
    """Write Newton-Schulz of tensors, as matrices [out, rest], to others of their shapes."""
    found = orthogonalise([tensor.flatten(1) for tensor in tensors], newton_schulz)
    for target, matrix in zip(targets, found, strict=True):
        target.copy_(matrix.reshape(target.shape))


def orthogonalise(matrices: Sequence[Tensor], newton_schulz: NewtonSchulz) -> list[Tensor]:
    """Newton-Schulz: ``U S V^T`` with S near 1 of each matrix ``[A, B]``.

    Matrices of one shape are multiplied in batches; the bits are those of each by itself.
    """
    batches: dict[tuple[int, int], list[int]] = {}
    for index, matrix in enumerate(matrices):
        batches.setdefault((min(matrix.shape), max(matrix.shape)), []).append(index)
    found: dict[int, Tensor] = {}
    for (rows, columns), indices in batches.items():
        size = max(1, BATCHED_ELEMENTS // (rows * columns)) if rows >= BATCHED_ROWS else 1
        for first in range(0, len(indices), size):
            batch = indices[first : first + size]
            wide = [_wide(matrices[index], newton_schulz.precision) for index in batch]
            iterate = _iterate if len(batch) == 1 else _iterate_batch
            for index, x in zip(batch, iterate(wide, newton_schulz), strict=True):
                found[index] = x.T if _is_tall(matrices[index]) else x
    return [found[index] for index in range(len(matrices))]


def _is_tall(matrix: Tensor) -> bool:
    return len(matrix) > matrix.shape[1]


def _wide(matrix: Tensor, precision: Precision) -> Tensor:
    if precision == "auto":
        precision = "float32" if matrix.device.type == "cpu" else "bf16"
    x = matrix.to(torch.bfloat16 if precision == "bf16" else torch.float32)
    return x.T if _is_tall(matrix) else x


def _iterate(alone: Sequence[Tensor], newton_schulz: NewtonSchulz) -> Sequence[Tensor]:
    (x,) = alone
    x = x / (_norms([x])[0] * newton_schulz.margin)
    for a, b, c in newton_schulz.polynomials:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return [x]


def _iterate_batch(matrices: Sequence[Tensor], newton_schulz: NewtonSchulz) -> Sequence[Tensor]:
    norms = _norms(matrices) * newton_schulz.margin
    x = torch.stack([*matrices]) / norms.view(-1, 1, 1)
    for a, b, c in newton_schulz.polynomials:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return [*x]


def _norms(matrices: Sequence[Tensor]) -> Tensor:
    """Return the norm of each, ``[N]``, with the bits that it has alone."""
    return torch.stack(torch._foreach_norm([*matrices])).clamp(min=SMALLEST_NORM)
