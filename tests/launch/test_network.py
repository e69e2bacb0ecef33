"""Runs over an emulated Ethernet: real namespaces, real shaping, nothing left behind."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlion.errors import UserError
from dlion.optim import DLion
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.suite.launch.network import Network, check_possible
from dlion.suite.training.meter import interface_bytes
from dlion.suite.units import parse_rate
from tests.conftest import ROOT
from tests.support.runs import assert_all_gone, start, train, until

able = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("tc") is not None
needs_root = pytest.mark.skipif(
    not able, reason="an emulated network needs Linux, root and iproute2 (ip and tc)"
)
LIGHTHOUSE = "10.177.0.2:29510"  # on the first node
SETTINGS = ["logger=none", "workers=4", "processes=4", "steps=8", "eval_every=4"]


def namespaces() -> list[str]:
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line.split()[0] for line in found.splitlines() if line.startswith("dlion-")]


def interfaces() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout


@pytest.mark.netns
@needs_root
def test_a_run_over_ethernet_gives_the_same_bits(tmp_path):
    before, others = interfaces(), set(namespaces())
    summaries = {}
    for network in ("none", "ethernet_100m"):
        directory = tmp_path / network
        done = train(*SETTINGS, f"network={network}", f"output_dir={directory}", code=0)
        summaries[network] = json.loads((directory / "summary.json").read_text())
    plain, ethernet = summaries["none"], summaries["ethernet_100m"]
    assert "links of 100 Mbit/s (emulated)" in done.stdout
    assert ethernet["parameters_sha256"] == plain["parameters_sha256"]
    assert plain["nic_bytes"] is None
    assert ethernet["nic_bytes"] > 8 * ethernet["sent_bytes_per_step"]
    assert not set(namespaces()) - others and interfaces() == before


def _count(path: Path) -> None:
    join_process_group("gloo")
    param = torch.nn.Parameter(torch.zeros(4_000_000))
    optimizer = DLion([param])
    rank = dist.get_rank()
    dist.barrier()  # the first parameters have arrived
    before, steps = interface_bytes(), 4
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    dist.barrier()
    (path / str(rank)).write_text(
        json.dumps([optimizer.channel.traffic.sent_bytes, interface_bytes() - before])
    )
    dist.destroy_process_group()


@pytest.mark.netns
@needs_root
def test_the_interface_counts_what_we_count(tmp_path):
    with Network(4, parse_rate("1gbit")) as network:
        run_processes(4, _count, tmp_path, network=network)
    for rank in range(4):
        ours, interface = json.loads((tmp_path / str(rank)).read_text())
        assert ours <= interface <= 1.1 * ours  # headers and acknowledgements


@pytest.mark.netns
@needs_root
def test_what_a_killed_launcher_leaves_is_removed_by_the_next(tmp_path):
    settings = [*SETTINGS[:3], "network=ethernet_100m", "steps=100000"]
    launcher = start(*settings, f"output_dir={tmp_path / 'run'}")
    workers = launcher.workers()
    left = {name for name in namespaces() if name.startswith(f"dlion-{launcher.pid}-")}
    assert len(left) == 5
    launcher.kill()
    assert left <= set(namespaces())
    assert_all_gone(workers)
    with Network(1, parse_rate("1gbit")):
        assert not left & set(namespaces())


@pytest.mark.netns
@needs_root
def test_a_link_that_is_cut_ends_the_run(tmp_path):
    settings = ["logger=none", "processes=4", "workers=4", "steps=100000", "timeout=3"]
    run = start(*settings, "network=ethernet_100m", f"output_dir={tmp_path}")
    workers = run.workers()
    (switch,) = (n for n in namespaces() if re.fullmatch(rf"dlion-{run.pid}-\d+-switch", n))
    subprocess.run(["ip", "-n", switch, "link", "set", "port2", "down"], check=True)
    done = run.wait(timeout=60)
    assert done.returncode == 1
    assert "one of them hangs, or the network is down" in done.stderr.splitlines()[-1]
    assert_all_gone(workers)


def test_rates():
    assert parse_rate("100mbit") == 100_000_000
    assert parse_rate("2.5gbit") == 2_500_000_000
    for wrong in ("fast", "100", "1.2.3mbit", "0mbit", 5, None):
        with pytest.raises(UserError, match="is not a rate: write a number and a unit"):
            parse_rate(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["network=ethernet_2m"], "network=ethernet_2m is unknown"),
        (["network.rate=quick"], "network.rate=quick is not a rate"),
    ],
)
def test_wrong_networks_are_named(settings, sentence):
    done = train(*settings, code=2)
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_without_root_the_error_says_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match=r"needs (root|Linux)"):
        check_possible()


def machine(network: Network, node: int, folder: Path, port: int) -> subprocess.Popen[str]:
    """Start train.py on a machine whose own name is 127.0.1.1, as Debian writes it."""
    names = ["nodea", "nodeb"]
    addresses = [f"10.177.0.{i + 2}" for i in range(2)]
    addresses[node] = "127.0.1.1"
    hosts = folder / f"hosts{node}"
    lines = [f"{address} {name}\n" for address, name in zip(addresses, names, strict=True)]
    hosts.write_text("127.0.0.1 localhost\n" + "".join(lines))
    inside = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
    command = [
        *("nsenter", f"--net=/run/netns/{network.namespace(node)}"),
        *("unshare", "--mount", "--uts", "sh", "-c", inside, str(hosts), names[node]),
        *(sys.executable, "train.py", "workers=2", "logger=none", "steps=1000000", "timeout=5"),
        *("log_every=5", "dataset=digits", f"output_dir={folder / 'run'}"),
    ]
    env = {"RANK": str(node), "WORLD_SIZE": "2", "MASTER_ADDR": "nodea", "MASTER_PORT": str(port)}
    pipe = subprocess.PIPE
    kept = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    return subprocess.Popen(command, cwd=ROOT, env=kept | env, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.netns
@needs_root
def test_two_debian_machines_train_and_a_cut_link_ends_both(tmp_path):
    with Network(2, parse_rate("1gbit")) as network:
        machines = [machine(network, node, tmp_path, 29600) for node in range(2)]
        metrics = tmp_path / "run" / "metrics.jsonl"

        def trained() -> bool:
            assert all(each.poll() is None for each in machines), machines[0].communicate()
            return metrics.exists() and metrics.stat().st_size > 0

        until(trained)
        switch = network.namespace(0).rpartition("-")[0] + "-switch"
        subprocess.run(["ip", "-n", switch, "link", "set", "port1", "down"], check=True)
        said = [each.communicate(timeout=60)[1] for each in machines]
    assert [each.returncode for each in machines] == [1, 1]
    for rank, errors in enumerate(said):
        assert f"process {rank} failed: " in errors.splitlines()[-1], errors
        assert "Traceback" not in errors


class Machines:
    """Two machines, a lighthouse on the first, and elastic workers."""

    def __init__(self, network: Network, directory: Path):
        self.network, self.directory = network, directory
        self.running: dict[str, subprocess.Popen] = {}
        self._begin(0, "lighthouse", "dlion", "lighthouse", "--bind", LIGHTHOUSE)
        until((directory / "lighthouse").read_text)

    def worker(self, node: int, name: str, **environment: str) -> None:
        options = [name, "dlion_mavo", '{"overlap": true}', "1000000", "0.02", "1"]
        module = "tests.optim.elastic_worker"
        self._begin(node, name, module, LIGHTHOUSE, *options, **environment)

    def _begin(self, node: int, name: str, *arguments: str, **environment: str) -> None:
        there = f"--net=/run/netns/{self.network.namespace(node)}"
        env = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "RUST_LOG": "error"} | environment
        said, errors = self.directory / name, self.directory / f"{name}.err"
        with said.open("w") as out, errors.open("w") as err:
            self.running[name] = subprocess.Popen(
                ["nsenter", there, sys.executable, "-m", *arguments],
                cwd=ROOT,
                env=env,
                stdout=out,
                stderr=err,
            )

    def rows(self, name: str) -> dict[int, list[str]]:
        lines = (self.directory / name).read_text().split("\n")[:-1]
        return {int(step): rest for step, *rest in map(str.split, lines)}

    def see(self, workers: int, name: str, after: int = -1) -> int:
        """Wait until a worker takes a step with so many, after another step; return that step."""

        def seen() -> list[int]:
            assert not self.running[name].poll()
            rows = self.rows(name).items()
            return [step for step, row in rows if row[0] == str(workers) and step > after]

        return until(seen)[-1]

    def end(self) -> None:
        for each in self.running.values():
            each.kill()
            each.wait()


@pytest.fixture
def machines(tmp_path):
    pytest.importorskip("torchft")
    with Network(2, parse_rate("10mbit")) as network:
        made = Machines(network, tmp_path)
        try:
            yield made
        finally:
            made.end()


@pytest.mark.netns
@needs_root
def test_elastic_workers_go_on_while_a_link_is_down_and_meet_again(machines):
    machines.worker(0, "a")
    machines.see(1, "a")
    machines.worker(1, "b")
    together = machines.see(2, "a")
    machines.see(2, "b")
    switch = machines.network.namespace(0).rpartition("-")[0] + "-switch"
    link = ["ip", "-n", switch, "link", "set", "port1"]
    subprocess.run([*link, "down"], check=True)
    first = machines.see(1, "a", after=together)
    alone = machines.see(1, "a", after=first + 2)  # the other may be a step ahead of the first
    subprocess.run([*link, "up"], check=True)
    for name in "ab":
        machines.see(2, name, after=alone)
    machines.end()
    there, away = machines.rows("a"), machines.rows("b")
    assert all(there[step][1] == away[step][1] for step in there.keys() & away.keys())
    assert [*there] == [*range(len(there))], "no step that was committed is lost"
    assert alone not in away and max(away) > alone


@pytest.mark.netns
@needs_root
def test_a_new_worker_that_others_cannot_reach_gives_up_and_they_go_on(machines, tmp_path):
    machines.worker(0, "a")
    machines.see(1, "a")
    # the second machine listens at an address that packets of the first never reach, as behind NAT
    for node, command in (
        (1, "link add inside type veth peer name other"),
        (1, "addr add 10.99.0.1/32 dev inside"),
        (1, "link set other up"),
        (1, "link set inside up"),
        (0, "route add 10.99.0.1/32 dev eth0"),
        (0, "neigh add 10.99.0.1 lladdr 02:00:00:00:00:99 dev eth0"),
    ):
        namespace = machines.network.namespace(node)
        subprocess.run(["ip", "-n", namespace, *command.split()], check=True)
    machines.worker(1, "b", GLOO_SOCKET_IFNAME="inside", PATIENCE="3")
    assert machines.running["b"].wait(120) == 2
    said = (tmp_path / "b.err").read_text()
    assert re.search("error: .*could not all connect in .* tries.* that of inside", said), said
    reached = max(machines.rows("a"))
    machines.see(1, "a", after=reached + 20)
    assert not machines.rows("b")
