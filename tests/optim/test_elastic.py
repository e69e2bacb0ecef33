"""Workers that come and go: real processes, a real lighthouse, SIGKILL."""

import json
import math
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dlion
from dlion.elastic import joining, of
from dlion.exchange import Channel
from dlion.methods import METHODS
from dlion.suite.lighthouse import start as lighthouse_at
from dlion.workers import Workers
from tests.optim.elastic_worker import clip, loss, model, sha256
from tests.support.runs import Run, until

pytest.importorskip("torchft.coordination")

STEPS = 40
TOLD = [
    "apart",
    "cuts",
    "dense",
    "lag",
    "nan",
    "patience",
    "stops",
    "store",
    "strays",
    "timeout",
    "version",
    "width",
]  # to a worker
Rows = dict[int, list[str]]  # of each step: workers, digest of the parameters before it


class Crew:
    """Workers of one run."""

    def __init__(self, *settings: Any) -> None:
        self.settings = settings  # address of the lighthouse, method, options, least workers
        self.processes: dict[str, Run] = {}

    def start(self, name: str, steps: int = 10**6, pause: float = 0.02, **other: str) -> None:
        address, method, options, least = self.settings
        options = other.get("options", options)
        command = ["-m", "tests.optim.elastic_worker", address, name, method, options]
        numbers = [str(number) for number in (steps, pause, least)]
        env = {
            "GLOO_SOCKET_IFNAME": other.get("interface", "lo"),
            "RUST_LOG": "error",
            "BREAKS": other.get("breaks", "-1"),
        }
        told = other.keys() & {*TOLD}
        env |= {key.upper(): other[key] for key in told}
        self.processes[name] = Run([*command, *numbers], env)

    def rows(self, name: str) -> Rows:
        lines = self.processes[name].stdout.split("\n")[:-1]
        return {int(step): rest for step, *rest in map(str.split, lines)}

    def said(self) -> str:
        return "".join(process.stderr for process in self.processes.values())

    def reached(self, name: str) -> int:
        """Return the latest step that a worker has begun; -1 before the first."""
        return max(self.rows(name), default=-1)

    def wait(self, what: Callable[[], Any]) -> None:
        until(what, self.said)

    def see(self, name: str, workers: int) -> None:
        """Wait until a worker takes steps with so many."""
        self.wait(lambda: (rows := self.rows(name)) and int([*rows.values()][-1][0]) == workers)

    def see_stopped(self, name: str) -> None:
        """Wait until a worker has stopped itself."""
        status = Path(f"/proc/{self.processes[name].pid}/stat")
        self.wait(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Crew]]:
    monkeypatch.setenv("RUST_LOG", "error")
    crews: list[Crew] = []
    lighthouses: list[Any] = []

    def make(
        method: str,
        options: str,
        least: int = 1,
        host: str = "127.0.0.1",
        together: int = 1,
        wait: float = 2.0,
    ) -> Crew:
        lighthouse = lighthouse_at(f"{host}:0", together, wait=wait)
        lighthouses.append(lighthouse)
        address = f"{host}:" + lighthouse.address().rpartition(":")[2]
        crews.append(Crew(address, method, options, least))
        return crews[-1]

    yield make
    for each in crews:
        each.stop()
    for lighthouse in lighthouses:
        lighthouse.shutdown()


def agree(*runs: Rows) -> None:
    """All that took a step had the same parameters before it."""
    for step in set.union(*map(set, runs)):
        assert len({rows[step][1] for rows in runs if step in rows}) == 1, step


def listens_on(pid: int) -> set[str]:
    """Return the addresses that a process listens on, as Linux writes them."""
    inodes = {link.stat().st_ino for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists()}
    tables = (Path(f"/proc/{pid}/net/{table}").read_text() for table in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    listening = [row for row in rows if row[3] == "0A" and int(row[9]) in inodes]
    return {row[1].partition(":")[0] for row in listening}


OVERLAP = '{"overlap": true, "bucket_cap_mb": 0.002}'
CASES = [
    ("dlion_mavo", OVERLAP),
    ("dlion_mavo", '{"weighted": true}'),
    ("diloco", '{"local_steps": 4}'),
    ("muloco", '{"local_steps": 4}'),
    ("sparseloco", '{"local_steps": 4}'),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "options"), CASES)
def test_all_are_equal_after_a_death_and_a_join(
    crew: Callable[..., Crew], method: str, options: str
) -> None:
    run = crew(method, options)
    for name in "abc":
        run.start(name)
    run.see("a", 3)
    run.processes["b"].send_signal(signal.SIGKILL)
    run.see("a", 2)
    run.see("c", 2)
    run.start("d")
    run.see("d", 3)
    run.see("a", 3)
    last = run.reached("a")
    run.wait(lambda: run.reached("d") > last + 5 and run.reached("c") > last + 5)
    run.stop()
    rows = [run.rows(name) for name in "abcd"]
    agree(*rows)
    seen = set.union(*map(set, rows))
    assert seen == {*range(max(seen) + 1)}, "no step that was committed is lost"
    assert min(rows[3]) > 0, "the new worker has begun with the state of a peer"


@pytest.mark.slow
@pytest.mark.parametrize(("method", "options"), [("dlion_mavo", OVERLAP), ("g_adamw", "{}")])
def test_a_worker_that_stops_is_not_waited_for_and_comes_back(
    crew: Callable[..., Crew], method: str, options: str
) -> None:
    run = crew(method, options)
    for name in "abc":
        run.start(name)
    for name in "abc":
        run.see(name, 3)
    run.processes["b"].send_signal(signal.SIGSTOP)  # its connections stay open
    run.see("a", 2)
    run.see("c", 2)
    stopped = run.reached("b")
    run.processes["b"].send_signal(signal.SIGCONT)
    run.wait(lambda: run.reached("b") > stopped + 5)
    run.see("a", 3)
    run.stop()
    rows = [run.rows(name) for name in "abc"]
    agree(*rows)
    seen = set.union(*map(set, rows))
    assert seen == {*range(max(seen) + 1)}


@pytest.mark.slow
@pytest.mark.parametrize(("who", "at"), [("a", "connects"), ("a", "gives"), ("c", "takes")])
def test_a_worker_that_stops_while_one_joins_is_not_waited_for(
    crew: Callable[..., Crew], who: str, at: str
) -> None:
    run = crew("g_adamw", "{}")
    stops = {who: {"stops": at}}
    for name in "ab":
        run.start(name, **stops.get(name, {}))
    for name in "ab":
        run.see(name, 2)
    run.start("c", **stops.get("c", {}))
    run.see_stopped(who)
    reached = run.reached("b")
    run.wait(lambda: run.reached("b") > reached + 20)
    run.processes[who].send_signal(signal.SIGCONT)
    for name in "abc":
        run.see(name, 3)
    run.stop()
    agree(*(run.rows(name) for name in "abc"))


@pytest.mark.slow
def test_a_worker_that_dies_in_the_midst_of_its_message_is_not_waited_for(
    crew: Callable[..., Crew],
) -> None:
    run = crew("g_adamw", "{}", least=1)
    width = str(400_000)  # a message of 21 MB is longer than what sockets hold
    run.start("a", width=width)
    run.see("a", 1)
    run.start("b", width=width, stops="waits")
    run.see_stopped("b")
    time.sleep(0.5)  # in which the sockets are filled
    for name, what in (("a", signal.SIGSTOP), ("b", signal.SIGCONT), ("a", signal.SIGKILL)):
        run.processes[name].send_signal(what)
        time.sleep(0.3)  # in which b takes what was in the sockets
    reached = run.reached("b")
    run.wait(lambda: run.reached("b") > reached + 2)
    run.stop()


@pytest.mark.slow
def test_a_worker_whose_peer_gave_up_in_the_midst_of_a_message_does_too(
    crew: Callable[..., Crew],
) -> None:
    run = crew("g_adamw", "{}", least=2, together=2)  # so that no quorum without it tells
    width = str(400_000)
    run.start("a", width=width, stops="waits")
    run.start("b", width=width)
    run.see_stopped("a")
    time.sleep(4)  # in which b gives up
    run.processes["a"].send_signal(signal.SIGCONT)
    reached = run.reached("b")
    run.wait(lambda: all(run.reached(name) > reached + 2 for name in "ab"))
    run.stop()
    agree(*(run.rows(name) for name in "ab"))


@pytest.mark.slow
def test_of_a_worker_whose_process_has_stopped_the_others_end_and_its_peers_go_on(
    crew: Callable[..., Crew], tmp_path: Path
) -> None:
    run = crew("g_adamw", "{}")
    for name in ("a0", "a1", "b0", "b1"):
        told = {"a1": {"lag": "0.5"}, "b1": {"stops": "steps"}}.get(name, {})
        store = f"{tmp_path / name[0]},{name[1]},2"
        run.start(name, store=store, timeout="4", **told)
    run.see_stopped("b1")
    reached = run.reached("a0")
    run.wait(lambda: all(run.reached(name) > reached + 5 for name in ("a0", "a1")))
    ended = run.processes["b0"].wait()
    assert ended.returncode == 2, ended.stderr
    assert "another process of this worker has ended, or not answered" in ended.stderr
    run.stop()
    agree(*(run.rows(name) for name in ("a0", "b0")))


def soon(address: str) -> Any:
    """Start a lighthouse where another has just ended."""
    for _ in range(100):
        with suppress(dlion.UserError):
            return lighthouse_at(address, 1, wait=2.0)
        time.sleep(0.2)
    raise AssertionError("the address is not free")


@pytest.mark.slow
def test_a_lighthouse_that_began_again_may_number_a_quorum_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    at = lighthouse_at("127.0.0.1:0", 1, wait=2.0)
    try:
        address = "127.0.0.1:" + at.address().rpartition(":")[2]
        net = model()
        optimizer = dlion.DLion(net.parameters(), lr=1e-3, manager=dlion.join(address))

        def fail() -> None:
            raise RuntimeError("gloo: Connection closed by peer")

        for step in range(3):
            optimizer.zero_grad()
            loss(net, step, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
            of(optimizer).attempt(fail)  # its connections are closed
            at.shutdown()
            at = soon(address)
        assert optimizer.param_groups[0]["steps"] == 3
    finally:
        at.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options", "inside"),
    [
        ("dlion_mavo", OVERLAP, {}),  # FSDP2
        ("sign_muon_mavo", "{}", {}),
        ("dlion_mavo", OVERLAP, {"dense": "1"}),
        ("diloco", '{"local_steps": 4}', {"dense": "1"}),
    ],
)
def test_workers_of_several_processes_die_and_join_whole(
    crew: Callable[..., Crew], method: str, options: str, inside: dict[str, str], tmp_path: Path
) -> None:
    run = crew(method, options)

    def start(name: str) -> None:
        for rank in range(2):
            run.start(f"{name}{rank}", store=f"{tmp_path / name},{rank},2", **inside)

    start("a")
    start("b")
    run.see("a0", 2)
    run.wait(lambda: len(run.rows("a0")) > 5)
    for rank in range(2):
        run.processes[f"b{rank}"].send_signal(signal.SIGKILL)
    run.see("a1", 1)
    start("c")
    run.see("c1", 2)
    run.see("a0", 2)
    last = run.reached("a0")
    run.wait(lambda: run.reached("c1") > last + 5)
    run.stop()
    if inside:  # each process has all parameters
        agree(*map(run.rows, run.processes))
    for rank in range(2):  # or a part of them
        rows = [run.rows(f"{name}{rank}") for name in "abc"]
        agree(*rows)
        seen = set.union(*map(set, rows))
        assert seen == {*range(max(seen) + 1)} and min(rows[2]) > 0


@pytest.mark.parametrize("what", ["state", "messages"])
def test_who_is_slow_is_waited_for_longer_than_connecting_took(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    state = {"x": torch.arange(400_000.0)}  # several parts

    def work(rank: int) -> Any:
        group = joining._make_group(60.0)
        group.configure(f"127.0.0.1:{store.port}/", str(rank), rank, 2, 1, 0, 1, [0, 1])
        time.sleep(3 * rank)  # connecting may take two seconds
        if what == "messages":
            channel = Channel(Workers())
            channel.move(Workers(rank, 2, group=group.parent), group.waits)
            return {"x": channel.gather(state["x"][None])[1 - rank]}
        transport = joining.GroupTransport(group)
        if rank:
            transport.send_checkpoint([0], 1, state, timedelta(seconds=60))
            return state
        return transport.recv_checkpoint(1, "", 1, timedelta(seconds=60))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, range(2))
    assert torch.equal(first["x"], state["x"]) and torch.equal(second["x"], state["x"])


@pytest.mark.slow
def test_processes_of_one_worker_with_a_model_each_are_refused(
    crew: Callable[..., Crew], tmp_path: Path
) -> None:
    run = crew("dlion_mavo", "{}")
    for rank in range(2):
        run.start(str(rank), store=f"{tmp_path / 'store'},{rank},2", apart="1")
    for process in run.processes.values():
        done = process.wait(60)
        assert done.returncode == 2
        assert "join() was given 2 processes that are one worker" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"), [("dlion_mavo", "{}"), ("dlion_avg", "{}"), ("terngrad", "{}")]
)
def test_without_failures_the_parameters_are_those_of_a_run_without_manager(
    crew: Callable[..., Crew], method: str, options: str
) -> None:
    run = crew(method, options, 2)
    for name in "ab":
        run.start(name, STEPS, 0)
    for name in "ab":
        assert run.processes[name].wait(120).returncode == 0
    net, entry = model(), METHODS[method]
    optimizer = entry.cls(net.parameters(), workers=dlion.Workers(local=2), **entry.options)
    for step in range(STEPS):
        for local in range(2):
            loss(net, step, local).backward()
            clip(net)
            optimizer.collect(local)
        optimizer.step()
    assert run.rows("a")[STEPS] == run.rows("b")[STEPS] == ["2", sha256(net)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options", "environment"),
    [
        ("dlion_mavo", "{}", {}),
        ("dlion_mavo", '{"overlap": true}', {}),
        # a peer has died, say, while others still wait for an answer about the same bucket
        ("dlion_mavo", OVERLAP, {"breaks": "-1", "cuts": "20"}),
        # it saw another step committed than the rest
        ("g_adamw", "{}", {"strays": "1"}),
        # the rest take the round to its end, exchange in vain, and count its steps
        ("diloco", '{"local_steps": 8}', {}),
    ],
)
def test_a_worker_that_gives_up_takes_the_state_of_its_peers_who_do_not_wait(
    crew: Callable[..., Crew], method: str, options: str, environment: dict[str, str]
) -> None:
    run = crew(method, options, 3)
    for name in "bc":
        run.start(name, STEPS, 0)
    run.start("a", STEPS, 0, **{"breaks": "20", **environment})
    for name in "abc":
        assert run.processes[name].wait(120).returncode == 0  # a message's timeout is longer
    agree(*map(run.rows, "abc"))


NOT_FINITE = [
    ("dlion_mavo", {}),
    ("dlion_mavo", {"overlap": True, "bucket_cap_mb": 0.002}),
    ("g_adamw", {}),
    ("diloco", {"local_steps": 4}),  # within a round
    ("muloco", {"local_steps": 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "options"), NOT_FINITE)
@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
def test_a_gradient_that_is_not_finite_neither_ends_nor_poisons_the_others(
    crew: Callable[..., Crew], method: str, options: dict[str, Any], nonfinite: str
) -> None:
    run = crew(method, json.dumps(options | {"nonfinite": nonfinite}))
    for name in "ab":
        run.start(name)
    run.start("c", nan="10")
    if nonfinite == "stop":
        ended = run.processes["c"].wait()
        said = r"error: the gradient of .* is not finite on worker 2 in step \d+: .*\n$"
        assert ended.returncode == 2 and re.search(said, ended.stderr), ended.stderr
    else:
        run.see("c", 3)
    go_on = "ab" if nonfinite == "stop" else "abc"
    reached = max(10, *map(run.reached, "ab"))
    run.wait(lambda: all(run.reached(name) > reached + 20 for name in go_on))
    for name in go_on:
        run.see(name, len(go_on))
    run.stop()
    agree(*map(run.rows, "abc"))


@pytest.mark.slow
def test_many_that_come_while_all_others_are_busy_do_not_begin_another_run(
    crew: Callable[..., Crew],
) -> None:
    run = crew("dlion_mavo", "{}")
    run.start("a", pause=15)
    run.wait(lambda: 1 in run.rows("a"))
    for name in "bcd":
        run.start(name)
    run.wait(lambda: all(map(run.rows, "bcd")))
    run.stop()
    assert all(min(run.rows(name)) > 0 for name in "bcd")
    agree(*map(run.rows, "abcd"))


@pytest.mark.slow
def test_nobody_is_left_out_when_a_worker_joins_in_the_middle_of_a_long_step(
    crew: Callable[..., Crew],
) -> None:
    run = crew("g_adamw", "{}", wait=30.0)
    for name in "abc":
        run.start(name, pause=3)
    for name in "abc":
        run.see(name, 3)
    run.start("d", pause=3)  # asks for the next step before all others
    run.wait(lambda: len(run.rows("d")) >= 3)
    run.stop()
    for step, row in [*run.rows("d").items()][:2]:
        assert [run.rows(name).get(step) for name in "abc"] == [row] * 3 and row[0] == "4"


def test_too_few_workers_for_the_lighthouse_are_not_taken_for_its_silence(
    crew: Callable[..., Crew],
) -> None:
    address, *_ = crew("dlion_mavo", "{}", together=2).settings
    manager = dlion.join(address, patience=4)
    optimizer = dlion.DLion(model().parameters(), lr=1e-3, manager=manager)
    with pytest.raises(dlion.TrainingFailed, match=r"fewer workers than .*--min-workers=2"):
        optimizer.zero_grad()
    manager.shutdown(wait=False)


@pytest.mark.slow
def test_workers_that_are_busy_are_not_taken_for_a_silent_lighthouse(
    crew: Callable[..., Crew],
) -> None:
    run = crew("g_adamw", "{}")
    run.start("a", pause=3600)
    run.see("a", 1)
    run.start("b", patience="4")
    said = run.processes["b"].wait().stderr
    assert re.search("error: no step began within .*: 1 of 2 workers .* more patience", said), said


def own_address() -> str:
    """Return this machine's address in a network; empty if it is in none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # of no machine; nothing is sent
        except OSError:
            return ""
        return probe.getsockname()[0]


@pytest.mark.slow
@pytest.mark.parametrize("host", ["[::1]", "localhost", "its own"])
def test_workers_meet_at_the_address_that_the_lighthouse_is_reached_from(
    crew: Callable[..., Crew], host: str
) -> None:
    address = own_address() if host == "its own" else host
    if not address or (host == "[::1]" and not Path("/proc/net/if_inet6").exists()):
        pytest.skip("this machine has no such address")
    run = crew("dlion_mavo", "{}", host=address)
    for name in "ab":
        run.start(name, interface="")  # gloo would listen where this machine's name leads to
    for name in "ab":
        run.see(name, 2)
    if host == "its own":
        words = socket.inet_aton(address)[::-1].hex().upper()
        assert listens_on(run.processes["a"].pid) == {words}, "there alone"
    agree(*map(run.rows, "ab"))


@pytest.mark.slow
def test_a_worker_with_other_settings_leaves_and_the_run_goes_on(
    crew: Callable[..., Crew],
) -> None:
    run = crew("dlion_mavo", "{}")
    run.start("a")
    run.see("a", 1)
    assert listens_on(run.processes["a"].pid) == {"0100007F"}, "127.0.0.1 alone"
    run.start("b", options='{"lr": 0.5}')
    run.start("c", version="0.0.1")
    run.start("d", width="48")
    for name, other in (
        ("b", "hyperparameters"),
        ("c", "version of dlion"),
        ("d", "parameter shapes"),
    ):
        done = run.processes[name].wait(120)
        assert done.returncode == 2
        assert f"other {other} than the run that it joins" in done.stderr
    before = run.reached("a")
    run.wait(lambda: run.reached("a") > before + 20)


class Manager:
    """Enough of torchft's to be refused."""

    _use_async_quorum = False

    class _pg:
        @staticmethod
        def getBackendName() -> str:
            return "torchft-gloo"


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("dlion_adm", {}, "its exchange keeps"),
        ("powersgd", {}, "its exchange keeps query"),
        ("ef_signsgd", {}, "its exchange keeps error"),
        ("ef21_sign", {}, "its exchange keeps"),
        ("onebit_adam", {}, "its exchange keeps"),
        ("diloco", {"wire": "sign"}, "its exchange keeps error"),
        ("diloco", {"inner": torch.optim.SGD}, "an inner optimizer of your own"),
        ("dlion_mavo", {"exchange": "auto"}, "for one number of workers"),
        ("dlion_mavo", {"workers": dlion.Workers()}, "manager= names the participants"),
        ("dlion_mavo", {"dense_group": object()}, "give both the same group"),
    ],
)
def test_what_cannot_have_changing_workers_is_refused(
    method: str, options: dict, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        entry = METHODS[method]
        entry.cls(
            [torch.nn.Parameter(torch.zeros(64, 64))], manager=Manager, **entry.options, **options
        )


def two_models() -> list[torch.nn.Module]:
    return [torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)]


def take_steps(optimizer: dlion.DLion, trained: torch.nn.Module) -> None:
    before = [parameter.clone() for parameter in trained.parameters()]
    optimizer.zero_grad()
    trained(torch.ones(1, 8)).square().sum().backward()
    optimizer.step()
    assert optimizer.committed and not any(map(torch.equal, before, trained.parameters()))


def test_a_second_optimizer_of_a_manager_is_told_what_to_do_instead(
    crew: Callable[..., Crew],
) -> None:
    nets, managers = two_models(), [dlion.join(crew("", "").settings[0]) for _ in range(2)]
    params = [[*net.parameters()] for net in nets]
    first = dlion.DLion(params[0], lr=1e-3, manager=managers[0])
    with pytest.raises(ValueError, match="this manager has an optimizer already"):
        dlion.DLion(params[1], lr=1e-3, manager=managers[0])
    second = dlion.DLion(params[1], lr=1e-3, manager=managers[1])
    for _ in range(2):
        take_steps(first, nets[0])
        take_steps(second, nets[1])
    for manager in managers:
        manager.shutdown(wait=False)


def test_one_optimizer_of_a_manager_steps_two_models_in_turn(crew: Callable[..., Crew]) -> None:
    nets, manager = two_models(), dlion.join(crew("", "").settings[0])
    groups = [
        {"params": net.parameters(), "lr": lr} for net, lr in zip(nets, (1e-3, 1e-4), strict=True)
    ]
    optimizer = dlion.DLion(groups, manager=manager)
    for net in [*nets, *nets]:
        take_steps(optimizer, net)
    manager.shutdown(wait=False)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1", "give HOST:PORT"),
        ("127.0.0.1:65537", "give HOST:PORT"),
        ("127.0.0.1:1", "lighthouse=127.0.0.1:1: no lighthouse there .*refused"),
        ("[::1]:1", "no lighthouse there"),
        (f"{'a' * 70}:1", "no lighthouse there"),
    ],
)
def test_no_lighthouse_is_one_sentence(address: str, said: str) -> None:
    with pytest.raises(dlion.UserError, match=said):
        dlion.join(address)


def test_another_service_is_not_taken_for_a_lighthouse() -> None:
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as other:
        thread = Thread(target=other.handle_request)
        thread.start()
        with pytest.raises(dlion.UserError, match="another service listens there"):
            dlion.join(f"127.0.0.1:{other.server_port}")
        thread.join()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timeout": 1e30}, "timeout=1e\\+30 is not possible: give 0 to 1000000 seconds"),
        ({"patience": math.nan}, "patience=nan is not possible"),
        ({"min_workers": 0}, "min_workers=0 is not possible"),
    ],
)
def test_values_that_nobody_can_wait_for_are_refused(options: dict, said: str) -> None:
    with pytest.raises(dlion.UserError, match=said):
        dlion.join("127.0.0.1:1", **options)


def test_an_interface_that_is_not_there_is_refused(
    crew: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nowhere0")
    with pytest.raises(dlion.UserError, match=r"no interface nowhere0: choose from .*lo"):
        dlion.join(crew("dlion_mavo", "{}").settings[0])
