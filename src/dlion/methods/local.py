"""Local updates: workers take local steps and exchange their displacements."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor

from dlion.core.bucket import Bucket, Names
from dlion.core.layout import Member
from dlion.core.optimizer import Common
from dlion.exchange import MEAN_WIRES, Exchange, MeanWire, ScaledSignMean, make_mean
from dlion.extensions.protocol import Extension
from dlion.methods.inner import INNER, Maker, OfTorch
from dlion.methods.matrices import Matrices
from dlion.methods.muon import MatricesApart
from dlion.methods.updates import nesterov
from dlion.values import Betas, Called, Count, NotNegative, Probability

InnerOptimizer = (
    Literal["adamw", "lion", "muon", "sgd"] | Annotated[Maker, Called("in Python a function")]
)


class InnerSteps(Extension):
    """Moves a worker by its own gradients, before it writes a message, if it does."""

    def before_encode(self, buckets: Sequence[Bucket], local: int) -> None:
        try:
            for bucket in buckets:
                self.optimizer.move(bucket, local)
        except BaseException:
            self.optimizer.failed = True
            raise


class LocalUpdate(MatricesApart):
    """Base of methods whose workers take local steps between exchanges.

    A round begins with the parameters x that all share. Worker i takes ``local_steps`` steps of its
    inner optimizer from there to x_i; then it sends its displacement ``x - x_i``, the outer step
    moves x by what comes back, and the next round begins. A ``step()`` is one inner step, of one
    gradient, so that steps compare with those of other methods; the last one of a round exchanges
    as well. Inner state (momenta) stays with its worker and continues in the next round.

    In a process of one worker the model always holds that worker's own parameters, and the loop is
    the usual one. Before an evaluation ``host(None)`` puts the shared parameters in, ``host(0)``
    those of the worker again::

        optimizer = DiLoCo(model.parameters(), local_steps=2)
        for batch in batches:
            loss_of(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.host(None)

    With several virtual workers the parameters of the next one are in the model after ``collect()``
    of the one before and after ``step()``; out of their order, ``host()`` says whose. Training ends
    with a whole round: after ``end_round()`` the next step exchanges wherever it is in its round.

    All of these parameters are kept in float32; those of the model are copies in its own dtype.
    What a loop writes into them before the first step is where all begin; later it is a move of
    that worker, as a step is. To resume, load the model first, then the optimizer.

    A parameter without a gradient takes no inner step, and its displacement, 0 or not, is sent. One
    that is frozen within a round returns to its shared value at the end of it. An absent worker
    takes no inner step; one that is absent at the end of a round sends nothing and begins again
    with all others. The loop's ``flag`` waits for the next messages. As nothing travels during a
    backward pass, ``overlap`` has no effect.

    A subclass fills in the exchange, ``encode``, which sends the :meth:`displacement` of a worker
    in some form, and ``update``, which moves ``bucket.shared["outer"]`` by the answer. The names of
    its own state go to those here.

    Args:
        inner: the inner optimizer, a key of INNER or a function that makes a torch optimizer of
            parameter groups. They have ``lr``, ``betas`` and ``weight_decay``, which are set before
            every step. It is called for every bucket and local worker, its state is in
            ``state_dict()``, and must be as it was on all processes.
        local_steps: H, steps of a round.
    """

    skips_missing: ClassVar[bool] = False
    moves_alone: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        inner: InnerOptimizer,
        local_steps: Count,
        **common: Unpack[Common],
    ):
        self.inner, self.local_steps = inner, local_steps
        self._inner = OfTorch(inner) if callable(inner) else INNER[inner]()
        self._last = False
        self._hosted: int | None = None  # whose parameters are in the model; None: what all share
        self.needs_full_matrices = self._orthogonalises = inner == "muon"
        self._loaded = False  # since the latest step
        self._of_method = Names(own_state=self.own_state, own_counters=self.own_counters)
        self.own_state = ["local", *self._inner.own_state, *self.own_state]
        self.own_counters = [*self._inner.own_counters, *self.own_counters]
        self.shared_state = ["outer", *self.shared_state]
        common["overlap"] = False
        common["extensions"] = [*common.get("extensions", ()), InnerSteps()]
        super().__init__(params, defaults=defaults, adamw_names=None, **common)

    def kind(self, member: Member) -> Matrices | None:
        return super().kind(member) if self.inner == "muon" else None

    def state_names(self, bucket: Bucket) -> Any:
        inner = self._inner.state_names(bucket)
        own = ["local", *inner.own_state, *self._of_method.own_state]
        counters = [*inner.own_counters, *self._of_method.own_counters]
        return Names(own, self.shared_state, self.counters, counters)

    def displacement(self, bucket: Bucket, local: int) -> Tensor:
        """Return how far a local worker has moved in this round, ``x - x_i``: ``[padded]``."""
        return bucket.shared["outer"] - bucket.own["local"][local]

    @torch.no_grad()
    def host(self, local: int | None) -> None:
        for bucket in self.buckets:
            bucket.adopt()
            shared = bucket.shared["outer"]
            bucket.params.copy_(shared if local is None else bucket.own["local"][local])
            bucket.write_back()
        self._hosted = local

    def end_round(self) -> None:
        self._last = True

    def collect(self, local: int) -> None:
        super().collect(local)
        self._host_next()

    def set_participants(self, workers: Sequence[int] | None) -> None:
        super().set_participants(workers)
        self._host_next()

    def common_state(self) -> dict[str, Tensor]:
        """As of all methods, without the parameters in the model, which are copies."""
        state = super().common_state()
        return {name: view for name, view in state.items() if not name.endswith(".parameters")}

    def get_extra_state(self) -> list[list[dict[str, Any]]]:
        return self._inner.state_dict(self.buckets)

    def set_extra_state(self, saved: list[list[dict[str, Any]]] | None) -> None:
        if saved is not None:
            self._inner.load_state_dict(self.buckets, saved)
        self._loaded = True
        self._host_next()

    @property
    def exchanges(self) -> bool:  # pyrefly: ignore[bad-override] - of the others it never changes
        """Whether the step at hand is the last of its round."""
        return self._last or (self.param_groups[0]["steps"] + 1) % self.local_steps == 0

    def move(self, bucket: Bucket, local: int) -> None:
        """Take a local worker's inner step."""
        self._take_over(bucket, local)
        own = (rows[local] for rows in bucket.own.values())
        with self.channel.timer.apply, bucket.preserve_missing(bucket.present(), own):
            self._inner.step(bucket, local)

    def end_step(self, exchanged: bool) -> None:
        # a round that not all could commit continues: what a worker has moved by is sent later
        self._last = self._loaded = False
        if exchanged:
            self.begin_round()
        else:
            self._host_next()

    def begin_round(self) -> None:
        for bucket in self.buckets:
            bucket.own["local"].copy_(bucket.shared["outer"])
        self.host(None)  # where all begin, whoever's turn is next

    def check_elastic(self) -> None:
        if isinstance(self._inner, OfTorch):
            raise ValueError(
                "an inner optimizer of your own does not work with workers that come and go"
                " (manager=): choose"
                f" {', '.join(INNER)}"
            )

    def _host_next(self) -> None:
        """Put the parameters of the worker whose turn it is into the model."""
        collected = self.collected
        waiting = [i for i in self.channel.local_participants if i not in collected]
        if waiting:
            self.host(waiting[0])

    @torch.no_grad()
    def _take_over(self, bucket: Bucket, local: int) -> None:
        """Take over what was written into the model, in any way, since parameters were put there.

        Of other dtypes than float32 those entries alone, as the worker's own are more precise.
        """
        bucket.adopt()
        params, own = bucket.params, bucket.own["local"][local]
        if bucket.step == 0 and not self.collected - {local}:
            self.begin(bucket)
        elif self._loaded and not torch.equal(own.to(params.dtype), params):
            raise RuntimeError(
                "the model was loaded after the optimizer, over this worker's own parameters: load"
                " the model first, then the optimizer's state"
            )
        elif params.dtype == torch.float32 and self._hosted == local:
            own.copy_(params)
        else:
            others = bucket.own["local"]
            hosted = bucket.shared["outer"] if self._hosted is None else others[self._hosted]
            own.copy_(torch.where(hosted.to(params.dtype) == params, own, params))

    @torch.no_grad()
    def begin(self, bucket: Bucket) -> None:
        """Let all begin with the parameters in the model."""
        bucket.shared["outer"].copy_(bucket.params)
        bucket.own["local"].copy_(bucket.shared["outer"])


class DiLoCo(LocalUpdate):
    """DiLoCo: many inner steps, then an outer step of Nesterov SGD on the mean displacement.

    Worker i takes H inner steps from x to x_i and sends ``d_i = x - x_i``. Everyone:
    ``a = mean d_i``, ``b <- mu b + a``, ``x <- x - outer_lr (a + mu b)``, at a constant rate; inner
    states are kept. Source: Douillard et al. 2023 (arXiv 2311.08105), Algorithm 1 and section 3,
    where H = 500, the inner optimizer is AdamW, ``outer_lr`` 0.7 and ``outer_momentum`` 0.9, which
    are the defaults here but for H; with Muon it is MuLoCo (Therien et al. 2025, arXiv 2505.23725),
    with H = 30. With H = 1, SGD inside and an outer step of 1 without momentum it is SGD on
    the mean gradient.

    The wire is the same both ways. ``float32``: as it is. ``bf16``: rounded to nearest even.
    ``int8``: multiples of the largest size of a piece / 127, to nearest even, and a scale of 4
    bytes for each piece, the part of a parameter tensor in a slice. ``sign``: signs with the mean
    size of a piece, with error feedback both ways: displacements go the way of gradients in
    :class:`EFSignSGD`. Results with int8 and sign depend on the number of workers and
    on the buckets.

    Memory: 12 bytes of state a parameter (its own and the shared parameters, outer momentum) and
    that of the inner optimizer: 8 with adamw, 4 with lion and for muon's matrices, 0 with sgd;
    4 + 4 / n more with sign.

    When not to use it: where the link carries one bit a step in time, as a worker's replica goes
    its own way between exchanges, and short trainings of small models lose by that; where memory is
    short; where evaluations between two exchanges matter, as they see the last shared parameters.

    Args:
        lr: of the inner optimizer, scheduled as always.
        inner: the optimizer that each worker takes its own steps with, without momentum for sgd.
            Muon is for the matrices that :class:`GMuon` chooses.
        betas: of adamw and lion; the first is the momentum of muon.
        weight_decay: of the inner optimizer, decoupled.
        local_steps: inner steps of each worker between two exchanges.
        outer_lr: rate of the outer step, not scheduled.
        outer_momentum: of the outer step, Nesterov's.
        wire: what displacements and their mean are rounded to.
    """

    shared_state = ["momentum_buffer"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: NotNegative = 1e-3,
        inner: InnerOptimizer = "adamw",
        betas: Betas = (0.9, 0.999),
        weight_decay: NotNegative = 0.0,
        local_steps: Count = 30,
        outer_lr: NotNegative = 0.7,
        outer_momentum: Probability = 0.9,
        wire: MeanWire | Literal["sign"] = "float32",
        **common: Unpack[Common],
    ):
        self.wire = wire
        self.own_state = ["residual"] if wire == "sign" else []
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "weight_decay": weight_decay,
            "outer_lr": outer_lr,
            "outer_momentum": outer_momentum,
        }
        super().__init__(params, defaults, inner, local_steps, **common)

    @property
    def paper_bits(self) -> tuple[float, float]:
        bits = _BITS[self.wire] / self.local_steps
        return bits, bits

    def make_exchange(self, bucket: Bucket) -> Exchange:
        about = self.channel, bucket.numel, bucket.spans
        if self.wire == "sign":
            return ScaledSignMean(*about, **bucket.buffers)
        return make_mean(self.wire, *about, **bucket.buffers)

    def encode(self, bucket: Bucket, local: int) -> None:
        displacement = self.displacement(bucket, local)
        if self.wire != "sign":
            bucket.exchange.encode(local, displacement)
            return
        residual = bucket.own["residual"][local]
        residual += displacement
        residual -= bucket.exchange.encode(local, residual)

    def update(self, bucket: Bucket) -> None:
        state, answer = bucket.shared, bucket.exchange.decode()
        vectors = state["outer"], state["momentum_buffer"], answer
        for segment in bucket.segments("outer_lr", "outer_momentum"):
            nesterov(*segment.of(*vectors), *segment.values)


_BITS = {**MEAN_WIRES, "sign": 1}
