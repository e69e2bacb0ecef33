"""What happens to a run while it trains, or to its files afterwards, costs it nothing silently."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from omegaconf import OmegaConf

from dlion.errors import Finished, RunFailed, Stopped, TrainingFailed, UserError
from dlion.suite import terminal
from dlion.suite.launch.local import run_processes
from dlion.suite.launch.meeting import join_process_group
from dlion.suite.launch.resume import alone_in, checkpoint_to_resume, finished_run
from dlion.suite.locks import holding
from dlion.suite.record.runs import RunRecord, load_run, record_failure
from dlion.suite.training.checkpoint import find
from dlion.suite.training.console import RunConsole
from dlion.suite.training.signals import SignalNotice
from tests.conftest import ROOT
from tests.support.runs import Run, latest_step, record, start, train

pytestmark = pytest.mark.slow

SMALL = ["dataset=digits", "model=linear", "logger=none", "workers=2", "processes=1"]
QUICK = [*SMALL, "steps=8", "log_every=2", "eval_every=8"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 8 steps that nothing happens to."""
    directory = tmp_path_factory.mktemp("survival") / "whole"
    train(*QUICK, f"output_dir={directory}", code=0)
    return directory


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The same run, stopped after step 6, with checkpoints of steps 4 and 6."""
    directory = tmp_path_factory.mktemp("survival") / "stopped"
    train(*QUICK, "checkpoint_every=2", "stop_after=6", f"output_dir={directory}", code=75)
    return directory


@pytest.fixture
def cut(stopped, tmp_path):
    """A copy of it."""
    return shutil.copytree(stopped, tmp_path / "cut")


def state_of(directory):
    return json.loads((directory / "checkpoint" / "step-00000006" / "state.json").read_text())


def forge(folder, change):
    """Change state.json and make its checksum fit."""
    state = json.loads((folder / "state.json").read_text())
    change(state)
    del state["sha256"]
    state["sha256"] = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
    (folder / "state.json").write_text(json.dumps(state))


def test_no_bit_of_a_checkpoints_state_can_change_unnoticed(cut):
    file = cut / "checkpoint" / "step-00000006" / "state.json"
    content, run = file.read_bytes(), state_of(cut)["run"]
    before, _ = find(cut, run)
    for bit in range(0, 8 * len(content), 29):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        found, complaints = find(cut, run)
        if complaints:
            assert found.progress.step == 4 and "state.json is damaged" in complaints[0]
        else:
            assert found == before


def swap_workers(folder):
    names = [folder / f"worker-0000{worker}.safetensors" for worker in range(2)]
    one, other = (name.read_bytes() for name in names)
    names[0].write_bytes(other)
    names[1].write_bytes(one)

    def swap(state):
        files = state["files"]
        first, second = (files[name.name] for name in names)
        files[names[0].name], files[names[1].name] = second, first

    forge(folder, swap)


def claim_a_long_header(folder):
    content = (1 << 60).to_bytes(8, "little") + b"{}"
    (folder / "common.safetensors").write_bytes(content)
    sums = [len(content), hashlib.sha256(content).hexdigest()]
    forge(folder, lambda state: state["files"].update({"common.safetensors": sums}))


def put_a_pipe_in_its_place(folder):
    (folder / "state.json").unlink()
    os.mkfifo(folder / "state.json")


def progress(**values):
    return lambda folder: forge(folder, lambda state: state["progress"].update(values))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (swap_workers, "worker-00000.safetensors is the file of another worker or step"),
        (claim_a_long_header, "common.safetensors is damaged"),
        (put_a_pipe_in_its_place, "state.json: it is not a regular file"),
        (progress(step=5), "it is of step 5, unlike its name"),
        (progress(step=True), "state.json is damaged"),
        (progress(step=6.0), "state.json is damaged"),
        (progress(last_row="x"), "state.json is damaged"),
        (progress(seconds=-1.0), "state.json is damaged"),
    ],
)
def test_a_forged_checkpoint_gives_way_to_the_one_before(cut, damage, complaint):
    run = state_of(cut)["run"]
    damage(cut / "checkpoint" / "step-00000006")
    found, (reason,) = find(cut, run)
    assert found.progress.step == 4 and complaint in reason


def test_a_run_goes_on_with_the_data_it_began_with(cut):
    for folder in (cut / "checkpoint").glob("step-*"):
        forge(folder, lambda state: state.update(samples=[9, 7]))
    refused = train(*QUICK, f"output_dir={cut}", "resume=auto", code=2)
    assert "is of a run with 9 and 7 samples to train and to test on, the data" in refused.stderr


def test_the_middle_of_a_round_is_no_step_like_others(tmp_path):
    rounds = [*QUICK, "optimizer=diloco", "optimizer.local_steps=2", f"output_dir={tmp_path}"]
    begun = train(*rounds, "stop_after=1", code=75)
    assert "a worker sends  nothing in 1 of 2 steps\n" in begun.stdout
    gone_on = train(*rounds, "resume=auto", code=0)
    assert re.search(r"a worker sends  [\d.]+ kB in one of 2 steps, 1/\d", gone_on.stdout)


def test_damage_of_all_kinds_at_once_is_named_and_changes_no_result(whole, cut):
    folder = cut / "checkpoint"
    for name in ("step-best", "step-00000004-copy", "old-step-00000004"):
        shutil.copytree(folder / "step-00000004", folder / name)
    (folder / "step-zzz").mkdir()
    (folder / "step-00000008.part").mkdir()
    rows = (cut / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    broken = [b'{"step": 1, "train\n', b"\xff\xfe\n", b"[1]\n", b'{"epoch": 1}\n', b"\x00" * 9]
    (cut / "metrics.jsonl").write_bytes(b"".join([*broken[:2], *rows, *broken[2:]]))
    (cut / "failure.txt").mkdir()
    done = train(*QUICK, "keep_checkpoints=1", f"output_dir={cut}", "resume=auto", code=0)
    kept = ["old-step-00000004", "step-00000004-copy", "step-00000008"]
    assert sorted(p.name for p in folder.iterdir()) == [*kept, "step-best", "step-zzz"]
    assert f"damaged lines of {cut}/metrics.jsonl, now in metrics.jsonl.damaged: 1, 2, 6, 7" in (
        done.stderr
    )
    assert (cut / "metrics.jsonl.damaged").read_bytes() == b"".join(broken[:4])
    assert record(cut) == record(whole)


def test_rows_that_are_gone_are_missed(cut):
    (cut / "metrics.jsonl").unlink()
    done = train(*QUICK, f"output_dir={cut}", "resume=auto", code=0)
    assert "metrics.jsonl has lost the rows after step 0, up to that of step 6" in done.stderr


def test_a_folder_has_one_run_at_a_time(cut):
    before = sorted(p.name for p in cut.iterdir())
    with alone_in(cut):
        for more in ([], ["resume=auto"]):
            refused = train(*QUICK, f"output_dir={cut}", *more, code=2)
            assert refused.stderr.count("\n") == 1
            assert f"{cut} is in use by another run" in refused.stderr
    assert sorted(p.name for p in cut.iterdir()) == before


def test_a_run_that_is_refused_leaves_no_folder(tmp_path):
    train(*QUICK, "workers=3", f"output_dir={tmp_path / 'a' / 'b'}", "processes=2", code=2)
    assert not list(tmp_path.iterdir())


def test_the_command_that_is_printed_leads_on_after_ctrl_c_and_a_lost_terminal(tmp_path):
    for number, code in ((signal.SIGINT, 130), (signal.SIGHUP, 75)):
        cut = tmp_path / f"cut {number}"
        run = start(*SMALL, "processes=2", "steps=100000", f"output_dir='{cut}'")
        for pid in (*run.workers(), run.pid):  # as the terminal does, to all
            os.kill(pid, number)
        if number == signal.SIGHUP:  # which the shell sends as well
            run.send_signal(number)
        done = run.wait(timeout=60)
        assert done.returncode == code, done.stderr
        saved, command = done.stderr.splitlines()[-1].split("; to resume: ")
        assert saved == f"stopped after step {latest_step(cut)}"
        again = Run([*shlex.split(command)[1:], "steps=1000000"]).wait()
        assert "the schedule of 1000000 has other learning rates" in again.stderr


def test_ctrl_c_while_python_imports_is_one_line():
    run = subprocess.Popen(
        [sys.executable, "train.py", *QUICK],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while "/torch/" not in Path(f"/proc/{run.pid}/maps").read_text():
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate()
    assert (run.returncode, said) == (130, "error: interrupted\n")


def _interrupt_launcher(times, finish=False, number=signal.SIGINT):
    if times == 2 or finish:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(times):
        os.kill(os.getppid(), number)
        time.sleep(0.2)
    return "finished" if finish else time.sleep(60)


def test_ctrl_c_is_not_lost_in_a_callback():
    lost = """
import os, signal, time, weakref
from dlion.suite.arguments import errors_end_the_command

class Freed: pass

def interrupt(_):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)

with errors_end_the_command():
    freed = Freed()
    noticed = weakref.ref(freed, interrupt)
    del freed
    time.sleep(60)
"""
    done = Run(["-c", lost]).wait()
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_a_second_ctrl_c_does_not_wait():
    with pytest.raises(Stopped) as stop:
        run_processes(1, _interrupt_launcher, 1)
    assert type(stop.value) is Stopped  # not Finished, after a minute
    assert (stop.value.step, stop.value.signal) == (None, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_processes(1, _interrupt_launcher, 2)


@pytest.mark.parametrize("seconds", [0, 1])  # while processes start, and while they work
def test_ctrl_c_that_another_thread_takes_ends_a_run(seconds):
    before = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        while signal.getsignal(signal.SIGINT) is before:
            time.sleep(1e-4)
        time.sleep(seconds)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Stopped) as stop:
        run_processes(1, time.sleep, 60)
    thread.join()
    assert type(stop.value) is Stopped


def test_no_run_follows_one_that_finishes_after_ctrl_c():
    with pytest.raises(Finished, match="stopped as this run has finished") as end:
        run_processes(1, _interrupt_launcher, 1, True)
    assert (end.value.result, end.value.signal) == ("finished", signal.SIGINT)
    with pytest.raises(Finished) as end:  # a second one of a scheduler's ends nothing
        run_processes(1, _interrupt_launcher, 2, True, signal.SIGUSR1)
    assert (end.value.result, end.value.signal) == ("finished", signal.SIGUSR1)


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with SignalNotice() as notice:
            signal.raise_signal(signal.SIGHUP)
            assert notice.first is None
            signal.raise_signal(signal.SIGUSR1)
            assert notice.first == signal.SIGUSR1
    finally:
        signal.signal(signal.SIGHUP, before)


def gone_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def closed_file():
    with Path(os.devnull).open("w") as stream:
        return stream


def full_disk():
    return Path("/dev/full").open("w")


@pytest.mark.parametrize("lose", [gone_pipe, closed_file, full_disk, lambda: None])
def test_a_terminal_or_log_that_goes_away_ends_nothing(monkeypatch, lose):
    handler = signal.getsignal(signal.SIGINT)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, lose())
    terminal.prepare()
    signal.signal(signal.SIGINT, handler)
    console = RunConsole(2, active=True)
    console.begin({"method": "dlion_mavo"})
    console.row({"step": 1, "train_loss": 1.0, "test_loss": 1.0, "sent_bytes": 1})
    console.finish("")
    print("to nobody", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        sys.stdout.close()


def test_time_left_is_that_of_the_steps_since_the_run_went_on(capsys, monkeypatch):
    console = RunConsole(1000, active=True, begun=900)
    started = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: started + 10)
    console.row({"step": 910, "train_loss": 1.0, "test_loss": 1.0, "sent_bytes": 1})
    assert re.search(r"  (90|91) s left\n$", capsys.readouterr().out)


def test_processes_meet_in_a_folder_of_any_name(tmp_path, monkeypatch):
    odd = tmp_path / "a#b?c d"
    odd.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    assert run_processes(2, _meet) == 2
    assert not [*odd.iterdir()] and [*tmp_path.iterdir()] == [odd]


def test_what_fails_leaves_no_temporary_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RunFailed, match="process 0 failed: ZeroDivisionError"):
        run_processes(1, divmod, 1, 0)
    assert not [*tmp_path.iterdir()] and tempfile.gettempdir() == str(tmp_path)


def _meet() -> int:
    join_process_group("gloo", 60)
    count = dist.get_world_size()
    dist.destroy_process_group()
    return count


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with alone_in(tmp_path):
        assert "has no locks (Function not implemented)" in capsys.readouterr().err


def test_a_lock_outlives_neither_its_holder_nor_its_file(tmp_path):
    file = tmp_path / "lock"
    with holding(file):
        with pytest.raises(BlockingIOError), holding(file):
            pass
        file.unlink()
        with holding(file):  # of a folder that was removed and made again
            pass
    assert not file.exists()


def test_rows_outlive_the_removal_of_their_folder(tmp_path, capsys):
    directory = tmp_path / "run"
    rows = RunRecord(directory)
    rows.append({"step": 1})
    shutil.rmtree(directory)
    rows.append({"step": 2})
    rows.append({"step": 3})
    rows.finish({})
    assert [row["step"] for row in load_run(directory).metrics] == [1, 2, 3]
    assert capsys.readouterr().err.count("was removed or moved while the run writes to it") == 1


def test_a_record_that_cannot_be_written_is_named(tmp_path):
    rows, limit = RunRecord(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        with pytest.raises(TrainingFailed, match=r"metrics.jsonl could not be written \(File too"):
            rows.append({"step": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    (tmp_path / "failure.txt").mkdir()
    record_failure(tmp_path, "boom")
    assert load_run(tmp_path).failure is None
    record_failure(tmp_path / "nothing", "interrupted")
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(UserError, match="is not writable"), alone_in(Path("/proc/run")):
        pass


def test_resuming_without_a_folder_finds_it_or_refuses(tmp_path):
    def run(*overrides, code):
        settings = [*SMALL, "steps=4", *overrides]
        done = Run([str(ROOT / "train.py"), *settings], cwd=tmp_path).wait()
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert "needs the sweep's folder: type" in run("-m", "resume=auto", "seed=0,1", code=2)
    assert not (tmp_path / "outputs").exists()
    run("stop_after=2", code=75)
    (first,) = tmp_path.glob("outputs/*/*")
    name = first.relative_to(tmp_path)
    assert "finds no unfinished run" in run("resume=auto", "seed=1", code=2)
    with alone_in(first):
        assert f"({name} is in use)" in run("resume=auto", code=2)
    assert f"going on with {name}, the newest unfinished run" in run("resume=auto", code=0)
    assert f"({name} is finished)" in run("resume=auto", code=2)
    assert list(tmp_path.glob("outputs/*/*")) == [first]
    named = "output_dir='runs/${optimizer.name}-${now:%H}/${now:%M-%S}'"
    run(named, "stop_after=2", code=75)
    assert "going on with runs/dlion_mavo-" in run(named, "resume=auto", code=0)


def settings_of(directory, **values):
    """Return the settings of a run for resume=auto, some of them replaced."""
    recorded = load_run(directory).config | {"resume": "auto"} | values
    return OmegaConf.create(recorded)


def test_a_finished_run_is_only_gone_on_with_if_there_is_more_to_do(whole, tmp_path, capsys):
    assert finished_run(settings_of(whole), whole).finished
    assert "is finished; nothing is left to do" in capsys.readouterr().out
    assert finished_run(settings_of(whole, steps=10), whole) is None
    with pytest.raises(UserError, match="schedule=constant can be extended"):
        checkpoint_to_resume(settings_of(whole), whole, 10)
    with pytest.raises(UserError, match="nothing is left of 6 steps"):
        checkpoint_to_resume(settings_of(whole), whole, 6)
    optimizer = load_run(whole).config["optimizer"] | {"lr": 0.5}
    with pytest.raises(
        UserError,
        match=r"optimizer\.lr is 0\.5 here and \S+ in the run, seed is 1 here and 0 in the run",
    ):
        finished_run(settings_of(whole, seed=1, optimizer=optimizer), whole)
    weights = str(whole / "model.safetensors")
    with pytest.raises(UserError, match=r"is finished, with other settings \(init_from is "):
        finished_run(settings_of(whole, init_from=weights), whole)
    begun_there = shutil.copytree(whole, tmp_path / "begun_there")
    config = OmegaConf.create(load_run(whole).config | {"init_from": weights})
    OmegaConf.save(config, begun_there / ".hydra" / "config.yaml")
    with pytest.raises(UserError, match=r"is finished, with other settings \(init_from is "):
        finished_run(settings_of(whole), begun_there)
    damaged = shutil.copytree(whole, tmp_path / "damaged")
    for content in ("{}", "[]"):
        (damaged / "summary.json").write_text(content)
        with pytest.raises(UserError, match=r"summary.json is damaged \("):
            finished_run(settings_of(whole), damaged)


def test_a_run_without_a_checkpoint_starts_anew_aloud_and_not_over_another(whole, tmp_path, capsys):
    config = settings_of(whole)
    assert checkpoint_to_resume(config, tmp_path, 8) is None
    assert f"nothing to resume in {tmp_path}: starting at step 0" in capsys.readouterr().out
    killed = shutil.copytree(whole, tmp_path / "killed")
    (killed / "summary.json").unlink()
    shutil.rmtree(killed / "checkpoint")
    assert checkpoint_to_resume(config, killed, 8) is None
    with pytest.raises(UserError, match=r"without a checkpoint, with other settings \(seed is 1"):
        checkpoint_to_resume(settings_of(whole, seed=1), killed, 8)


def test_a_constant_schedule_is_extended_to_the_bit(tmp_path):
    settings = [*SMALL, "schedule=constant", "log_every=2", "eval_every=2"]
    train(*settings, "steps=8", f"output_dir={tmp_path / 'whole'}", code=0)
    for steps in (4, 8):
        resume = ["resume=auto"] if steps == 8 else []
        train(*settings, f"steps={steps}", *resume, f"output_dir={tmp_path / 'more'}", code=0)
    assert record(tmp_path / "more") == record(tmp_path / "whole")
