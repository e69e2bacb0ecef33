"""Waits for messages that end before these are there."""

import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Timer
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlion.elastic.waits import Waits

LIMIT = timedelta(seconds=60)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, LIMIT), range(2)))


def test_a_wait_that_a_signal_interrupts_stays_until_the_message_is_there(
    groups: list[Any],
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    received = torch.zeros(1)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    Timer(1.0, lambda: groups[1].send([torch.ones(1)], 0, 0).wait(LIMIT)).start()
    with pytest.raises(KeyboardInterrupt):
        Waits(groups[0], LIMIT).wait([groups[0].recv([received], 1, 0)])
    signal.signal(signal.SIGALRM, before)
    assert received == 1, "no thread is left in gloo, which may abort Python as it ends"


def test_all_waits_end(groups: list[Any]) -> None:
    waits = Waits(groups[0], LIMIT)
    Timer(0.5, waits.end).start()
    requests = [groups[0].recv([torch.zeros(1)], 1, tag) for tag in range(3)]
    with ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(waits.wait, [request]) for request in requests]
    assert all("a peer has left" in str(end.exception()) for end in ends)
    barrier = groups[0].barrier()
    with pytest.raises(RuntimeError, match="a peer has left"):
        waits.wait_queued(barrier)
    groups[1].barrier().wait()
    barrier.wait()
    waits.wait_queued(barrier)  # it is there
    for tag in range(3):  # so that no thread is left in gloo
        groups[1].send([torch.zeros(1)], 0, tag).wait(LIMIT)
