"""Exchanges among the workers of this process, and what holds for several of them."""

from collections.abc import Callable

import torch

from dlion.exchange import Channel, Exchange
from dlion.workers import Workers

D = 1000
SIZE = 18 * 64  # of whole words, in one slice, two or three

Make = Callable[[Channel], Exchange]


def votes(n: int, levels: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randint(levels, (n, D), generator=torch.Generator().manual_seed(seed))


def ask(exchange, rows: torch.Tensor, step: int = 0) -> torch.Tensor:
    for i, row in enumerate(rows):
        exchange.encode(i, torch.nn.functional.pad(row, (0, exchange.numel - D)))
    exchange.run(step)
    return exchange.decode()[:D]


def assert_lossy(make: Make, n: int) -> None:
    """Ask for what a message says, which leaves the values alone.

    So what a worker is to keep is the difference.
    """
    exchange = make(Channel(Workers(local=n)))
    rows = torch.randn(n, SIZE, generator=torch.Generator().manual_seed(0))
    before = rows.clone()
    said = [exchange.encode(local, row) for local, row in enumerate(rows)]
    exchange.run(0)
    if hasattr(exchange, "sent"):  # which may need the answer to its first round
        said = [exchange.sent(local) for local in range(n)]
    assert torch.equal(rows, before)
    kept = rows - torch.stack(said)
    assert (kept.norm(dim=1) < rows.norm(dim=1)).all() and kept.any()
    back = exchange.decode() + exchange.state.get("error", torch.zeros(SIZE)).flatten()[:SIZE]
    torch.testing.assert_close(back, torch.stack(said).mean(0))


def assert_absent_do_not_count(make: Make, dtype: torch.dtype) -> None:
    """Ask that the absent neither count nor send."""
    rows = torch.randint(2, (6, D), generator=torch.Generator().manual_seed(3)).to(dtype)
    some, few = Channel(Workers(local=6)), Channel(Workers(local=2))
    exchange, expected = make(some), make(few)
    ask(exchange, rows)
    everyone = some.traffic.sent_bytes
    if "previous" in exchange.state:
        exchange.state["previous"].fill_(-1)
    some.set_participants([1, 3])
    answer = ask(exchange, rows, step=1)
    assert torch.equal(answer, ask(expected, rows[[1, 3]], step=1))
    assert some.traffic.sent_bytes - everyone < everyone
