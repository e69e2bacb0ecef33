"""Reads this process's place from the variables of torchrun or SLURM."""

import os
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dlion.errors import UserError

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_SHELLS = ("bash", "csh", "dash", "fish", "ksh", "sh", "tcsh", "zsh")
_PORTS = range(20000, 32760)  # below those that Linux gives to outgoing connections


@dataclass(frozen=True)
class RankInfo:
    """This process among those that torchrun or SLURM started.

    Attributes:
        source: ``torchrun`` or ``SLURM``.
        rank: number of this process in the run.
        processes: number of processes in the run.
        local_rank: number of this process on its machine.
        local_processes: number of processes on this machine (SLURM: on the step's first machine).
        one_machine: whether all processes are on one machine.
        run: its name; another run that looks for its processes at the same port has another.
        port: where the processes meet.
        address: of the machine where they do; None: MASTER_ADDR says it.
        believed: the variables that say how many processes there are.
    """

    source: str
    rank: int
    processes: int
    local_rank: int
    local_processes: int
    one_machine: bool
    run: str
    port: int
    address: str | None = None
    believed: tuple[str, str] = ("WORLD_SIZE", "RANK")

    def export(self) -> None:
        """Set the variables that :mod:`dlion.suite.launch.meeting` reads, as torchrun would.

        Processes on one machine meet on loopback, whatever MASTER_ADDR says, and use it, unless
        GLOO_SOCKET_IFNAME names an interface.

        Raises:
            UserError: if nothing says where the processes meet.
        """
        env = os.environ
        if self.address is None and "MASTER_ADDR" not in env:
            raise UserError(
                f"{self.source} does not say where the processes meet: set MASTER_ADDR to the first"
                " machine's name and MASTER_PORT to a free port"
            )
        size, unset = self.believed
        said = f"{unset}={env[unset]} and {size}={env[size]} say that {self.source} starts"
        program = "srun" if self.source == "SLURM" else self.source
        env.setdefault(  # the variables below will say torchrun
            "DLION_STARTED",
            f"{said} {self.processes} processes: start all of them with {program}, or type"
            f" `unset {unset}` first to train without {self.source}",
        )
        env["RANK"], env["WORLD_SIZE"] = str(self.rank), str(self.processes)
        env["LOCAL_RANK"], env["DLION_RUN"] = str(self.local_rank), self.run
        if self.address is not None:
            env.setdefault("MASTER_ADDR", self.address)
        env["MASTER_PORT"] = str(self.port)
        if self.one_machine:
            env["MASTER_ADDR"] = "127.0.0.1"
            env.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)


def detect() -> RankInfo | None:
    """Return this process's number if torchrun or SLURM started it, else None.

    Raises:
        UserError: if a variable is missing, or is not a number or port.
    """
    return _torchrun(os.environ) or _slurm(os.environ)


def is_first() -> bool:
    """Whether this process writes the records and prints for all processes."""
    try:
        started = detect()
    except UserError:  # the variables are wrong, and each process shall say so
        return True
    return started is None or started.rank == 0


def among_others() -> bool:
    """Whether torchrun or SLURM started this process and others."""
    try:
        started = detect()
    except UserError:
        return False
    return started is not None and started.processes > 1


def restarted() -> bool:
    """Whether SLURM or torchrun has restarted this run after an interruption.

    Of torchrun's agents, each counts for itself, and one whose processes ended because of another's
    does not count that: see :func:`job_name`.
    """
    names = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    return any(_number(os.environ, name, 0) > 0 for name in names)


def job_name() -> str | None:
    """Return the name that torchrun was given (``--rdzv-id``): its attempts have it in common."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if name == "none" else name  # torchrun's own word for no name


def _torchrun(env: Mapping[str, str]) -> RankInfo | None:
    """Read torchrun's variables; None: it did not start this process."""
    if "RANK" not in env or "WORLD_SIZE" not in env:
        _refuse_mpi(env)
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise UserError(
            f"RANK and WORLD_SIZE are set, but not {' and not '.join(missing)}: start the processes"
            " with torchrun, or unset RANK and WORLD_SIZE"
        )
    rank, processes = (_number(env, name) for name in ("RANK", "WORLD_SIZE"))
    if not 0 <= rank < processes:
        raise UserError(
            f"RANK={rank} is not possible with WORLD_SIZE={processes}: the first is 0, the last"
            " WORLD_SIZE - 1"
        )
    return RankInfo(
        source="torchrun",
        rank=rank,
        processes=processes,
        local_rank=_number(env, "LOCAL_RANK", rank),
        local_processes=_number(env, "LOCAL_WORLD_SIZE", processes),
        one_machine=env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"],
        run=re.sub(r"\s", "_", f"torchrun-{env.get('TORCHELASTIC_RUN_ID')}-{_port(env)}"),
        port=_port(env),
    )


def _refuse_mpi(env: Mapping[str, str]) -> None:
    """Refuse to train alone where mpirun has started several processes.

    SLURM's own srun may set the variables of PMI and PMIx, and is read by :func:`_slurm`.
    """
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        if "SLURM_STEP_ID" not in env and _number(env, name, 1) > 1:
            raise UserError(
                f"mpirun started {env[name]} processes ({name}), each of which would train alone:"
                " start them with torchrun or srun, or without mpirun as workers=N"
            )


def _slurm(env: Mapping[str, str]) -> RankInfo | None:
    """Read the variables of a SLURM step of several tasks; None: this process is not one of them.

    SLURM_PROCID alone does not show it, as a batch script has that as well.
    """
    processes = _number(env, "SLURM_STEP_NUM_TASKS", 1)
    if "SLURM_STEP_ID" not in env or processes == 1 or _typed_in_a_shell(env):
        return None
    per_machine = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", ""))  # 8(x4) or 8,4
    one_machine = _number(env, "SLURM_STEP_NUM_NODES", 1) == 1
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    run = "slurm-" + ".".join(str(_number(env, name, 0)) for name in names)
    return RankInfo(
        source="SLURM",
        rank=_number(env, "SLURM_PROCID"),
        processes=processes,
        local_rank=_number(env, "SLURM_LOCALID"),
        local_processes=int(per_machine[0]) if per_machine else processes,
        one_machine=one_machine,
        run=run,
        address="127.0.0.1" if one_machine else _first_host(env.get("SLURM_STEP_NODELIST", "")),
        port=_port(env, _PORTS[zlib.crc32(run.encode()) % len(_PORTS)]),
        believed=("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"),
    )


def _typed_in_a_shell(env: Mapping[str, str]) -> bool:
    """Whether SLURM has started a shell for somebody to type in, and not this command.

    ``srun`` in an interactive job starts processes that are to find each other, though they have
    the job's name and the variables of its terminal. So the task itself is looked at; one that
    cannot be seen, from inside a container say, counts as this command.
    """
    task = Path("/proc", env.get("SLURM_TASK_PID", "none"))
    try:
        name, *options = (task / "cmdline").read_text().rstrip("\0").split("\0")
        terminal = str((task / "fd" / "0").readlink()).startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        named = env.get("SLURM_JOB_NAME") in (*_SHELLS, "interactive") or "SLURM_PTY_PORT" in env
        return named and "SLURM_TASK_PID" not in env
    is_shell = Path(name).name.removeprefix("-") in _SHELLS
    return terminal and is_shell and all(option.startswith("-") for option in options)


def _first_host(hosts: str) -> str | None:
    """Return the first name in a SLURM node list such as ``gpu[03-05,7],login1``.

    A name may have several lists, ``rack[0-1]node[01-16]-ib``: of each the first number counts,
    which is written with the zeros that the name has.
    """
    name = re.match(r"(?:[^,\s\[\]]|\[[^\[\]]*\])+", hosts.lstrip(", \t\n"))
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", name[0]) if name else None


def _port(env: Mapping[str, str], default: int | None = None) -> int:
    """Return MASTER_PORT, or the default if it is not set."""
    port = _number(env, "MASTER_PORT", default)
    if not 0 < port < 1 << 16:
        raise UserError(f"MASTER_PORT={port} is no port: set it to one from 1 to 65535")
    return port


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable as a number, or the default if it is not set."""
    value = env.get(name, "")
    if not value and default is not None:
        return default
    try:
        return int(value)
    except ValueError:
        raise UserError(
            f"the environment says {name}={value}, which must be a number: start the processes with"
            " torchrun or srun, or unset it"
        ) from None
