"""One exchange after another."""

from collections.abc import Callable

from torch import Tensor

from dlion.exchange.direct_send import DirectSend, Exchange


class Switch(Exchange):
    """Two exchanges of the same parameters, of which the method chooses one for each step.

    Args:
        make_first: makes the first exchange, which keeps no state; it is made when it is needed,
            and given up when the second one runs.
        second: its state is the state of both.
        use_first: says whether the first one carries the messages of the step at hand; equal
            everywhere, from the first message to the answer.
    """

    def __init__(
        self,
        make_first: Callable[[], DirectSend],
        second: DirectSend,
        use_first: Callable[[], bool],
    ) -> None:
        super().__init__(second.channel, second.numel, second.header_bytes, second.device)
        self._make_first, self._second, self.use_first = make_first, second, use_first
        self._first: DirectSend | None = None
        self._latest = second  # the one that ran last
        self.state, self.slice = second.state, second.slice

    @property
    def current(self) -> DirectSend:
        """The exchange of the step at hand."""
        if not self.use_first():
            return self._second
        if self._first is None:
            self._first = self._make_first()
        return self._first

    def encode(self, local: int, values: Tensor) -> Tensor | None:
        """As the current one does."""
        return self.current.encode(local, values)

    def encode_header(self, local: int, header: Tensor) -> None:
        self.current.encode_header(local, header)

    def run(self, step: int) -> None:
        self._latest = self.current
        if self._latest is self._second:
            self._first = None
        self._latest.run(step)
        self.headers, self.answer = self._latest.headers, self._latest.answer

    def decode(self) -> Tensor:
        return self._latest.decode()

    def elementwise(self) -> dict[str, Tensor]:
        return self._second.elementwise()

    def set_elementwise(self, values: dict[str, Tensor]) -> None:
        self._second.set_elementwise(values)
