"""A SLURM cluster of several nodes on this machine, with accounting, while a test needs it."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "mariadb-install-db")
PACKAGES = "slurm-wlm munge slurmdbd mariadb-server"


def reason_to_skip() -> str | None:
    """Why there cannot be a cluster here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a SLURM cluster of its own needs Linux and root"
    if any(shutil.which(program) is None for program in PROGRAMS):
        return f"a SLURM cluster needs: apt-get install --no-install-recommends {PACKAGES}"
    return None


@contextlib.contextmanager
def cluster(nodes: int, cpus: int) -> Iterator[dict[str, str]]:
    """Start a cluster with nodes that claim so many CPUs each; gives the environment to use it."""
    folder = Path(tempfile.mkdtemp(prefix="dlion-slurm-"))
    folder.chmod(0o755)  # munge wants its socket to be reachable by all
    try:
        env = _start(folder, nodes, cpus)
        try:
            yield env
        finally:
            _end_jobs(env)
    finally:
        _stop(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, nodes: int, cpus: int) -> dict[str, str]:
    for name in ("run", "state", "log", "database"):
        (folder / name).mkdir()
    (folder / "run").chmod(0o755)
    for private in ("log", "state"):
        (folder / private).chmod(0o700)
    munge = _start_munge(folder)
    ports = [_free_port() for _ in range(nodes + 2)]
    accounting = _start_accounting(folder, munge, ports[1])
    config = folder / "slurm.conf"
    config.write_text(_configuration(folder, nodes, cpus, munge, ports))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    env = os.environ | {"SLURM_CONF": str(config), **accounting}
    _call("slurmctld", "-c", "-f", str(config), env=env)
    for i in range(nodes):
        (folder / f"spool.node{i}").mkdir()
        _call("slurmd", "-N", f"node{i}", "-f", str(config), env=env)
    info = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
    _wait_for(lambda: _output(info, env).strip() == str(nodes), "the nodes", folder)
    return env


def _start_munge(folder: Path) -> Path:
    key, munge = folder / "munge.key", folder / "run" / "munge.sock"
    key.touch(0o600)
    key.write_bytes(os.urandom(1024))
    files = {
        "key-file": key,
        "socket": munge,
        "pid-file": folder / "run" / "munged.pid",
        "log-file": folder / "log" / "munged.log",
        "seed-file": folder / "log" / "munged.seed",
    }
    _call("munged", "--force", *(f"--{name}={path}" for name, path in files.items()))
    return munge


def _start_accounting(folder: Path, munge: Path, port: int) -> dict[str, str]:
    """A database and slurmdbd: without them nobody is told that a job was cancelled."""
    data, run = folder / "database", folder / "run"
    where = ["--no-defaults", "--user=root", f"--datadir={data}"]
    _call("mariadb-install-db", *where, "--auth-root-authentication-method=normal")
    with (folder / "log" / "mariadb.log").open("w") as log:
        subprocess.Popen(
            ["mariadbd", *where, f"--socket={run / 'database.sock'}", "--skip-networking",
             f"--pid-file={run / 'mariadbd.pid'}"],
            stdout=log, stderr=log,
        )  # fmt: skip
    ping = ["mariadb-admin", "--no-defaults", f"--socket={run / 'database.sock'}", "ping"]
    _wait_for(lambda: "alive" in _output(ping, None), "the database", folder)
    config = folder / "slurmdbd.conf"
    config.touch(0o600)
    host = socket.gethostname().split(".")[0]
    config.write_text(
        f"AuthType=auth/munge\nAuthInfo=socket={munge}\nDbdHost={host}\nDbdAddr=127.0.0.1\n"
        f"DbdPort={port}\nSlurmUser=root\nPidFile={run / 'slurmdbd.pid'}\n"
        f"LogFile={folder / 'log' / 'slurmdbd.log'}\nStorageType=accounting_storage/mysql\n"
        "StorageHost=localhost\nStorageUser=root\nStorageLoc=slurm\n"
    )
    socket_of = {"MYSQL_UNIX_PORT": str(run / "database.sock")}
    _call("slurmdbd", env=os.environ | socket_of | {"SLURM_CONF": str(config)})
    _wait_for(lambda: _listens(port), "slurmdbd", folder)
    return socket_of


def _configuration(folder: Path, nodes: int, cpus: int, munge: Path, ports: list[int]) -> str:
    host = socket.gethostname().split(".")[0]
    settings = {
        "ClusterName": "test",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": ports[0],
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={munge},cred_expire=5",  # seconds; a requeued job waits for it
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool.%n",
        "SlurmctldPidFile": folder / "run" / "slurmctld.pid",
        "SlurmdPidFile": folder / "run" / "slurmd.%n.pid",
        "SlurmctldLogFile": folder / "log" / "slurmctld.log",
        "SlurmdLogFile": folder / "log" / "slurmd.%n.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": "127.0.0.1",
        "AccountingStoragePort": ports[1],
        "AccountingStoragePass": munge,
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,bf_interval=1",
        "SwitchType": "switch/none",
        "MpiDefault": "none",
        "SlurmdParameters": "config_overrides",
        "KillWait": 3,
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    for i in range(nodes):
        lines.append(
            f"NodeName=node{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[i + 2]}"
            f" CPUs={cpus} RealMemory=4000"
        )
    lines.append(f"PartitionName=main Nodes=node[0-{nodes - 1}] Default=YES MaxTime=INFINITE")
    return "\n".join(lines) + "\n"


def _end_jobs(env: dict[str, str]) -> None:
    """Those of a test that failed would go on without their daemons."""
    subprocess.run(["scancel", "--user=root"], env=env, timeout=60)
    deadline = time.monotonic() + 15
    while _output(["squeue", "--noheader"], env).strip() and time.monotonic() < deadline:
        time.sleep(0.1)


def _stop(folder: Path) -> None:
    """End the daemons in the order in which they need each other."""
    for pattern in ("slurmd.*.pid", "slurmctld.pid", "slurmdbd.pid", "mariadbd.pid", "munged.pid"):
        for file in (folder / "run").glob(pattern):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(file.read_text()), signal.SIGTERM)
        deadline = time.monotonic() + 10
        while list((folder / "run").glob(pattern)) and time.monotonic() < deadline:
            time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _call(*command: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {done.stderr or done.stdout}")


def _output(command: list[str], env: dict[str, str] | None) -> str:
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60).stdout


def _wait_for(ready: Callable[[], bool], what: str, folder: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            logs = [f"{f.name}: {f.read_text()[-500:]}" for f in (folder / "log").glob("*.log")]
            raise RuntimeError(f"{what} did not come up\n" + "\n".join(logs))
        time.sleep(0.1)
