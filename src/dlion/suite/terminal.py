"""Output of a command to its terminal, pipe or log, and its answer to Ctrl-C."""

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer, main_thread
from typing import Any, NoReturn, TextIO

_LONGEST = 1000  # characters of a sentence
_FORMAT = warnings.formatwarning
_AGAIN = 0.01  # seconds, in which Python leaves a callback


def prepare() -> None:
    """Prepare a command's process, before slow imports and any output.

    Nothing that is printed ends it, though the terminal, pipe or log may go away: all goes through
    ``sys.stdout`` and ``sys.stderr``, which are replaced. Ctrl-C ends it with one line and exit
    code 130, until :func:`raise_interrupts` is called. Without a folder to be in it ends at once.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # it takes the place of one that was closed, which no other file may get
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or Path(os.devnull).open("w")  # noqa: SIM115 - it stays open
        if not isinstance(stream, _Guarded):
            setattr(sys, name, _Guarded(stream))
    _at_interrupt(_leave)
    warnings.formatwarning = _in_one_line
    # torch writes a page of stack frames for every connection that a worker's death closes
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        Path.cwd()
    except FileNotFoundError:
        print("error: the folder you are in was deleted: type cd DIR first", file=sys.stderr)
        sys.exit(2)


def _in_one_line(message: Warning | str, category: type[Warning], *where: Any, **line: Any) -> str:
    """Return what is printed of a warning: a line where it is for users and no programmers."""
    if category is UserWarning:
        return f"warning: {message}\n"
    return _FORMAT(message, category, *where, **line)


def raise_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, as there is something to clean up from here on."""
    _at_interrupt(signal.default_int_handler)


@contextmanager
def interrupts_raised_again() -> Iterator[None]:
    """Raise a Ctrl-C again that Python drops: in a weakref's callback, or a destructor.

    That is no rarity. What a library computes in C++ or Rust holds a signal back until it returns,
    and what comes next is often that something is freed.
    """
    before = sys.unraisablehook

    def again(dropped: Any) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            before(dropped)
            return
        timer = Timer(_AGAIN, signal.pthread_kill, (main_thread().ident, signal.SIGINT))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before


def ignore_interrupts() -> None:
    """Let Ctrl-C do nothing while Python ends, which would end it with a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def patience(doing: str, seconds: float = 20, to: TextIO | None = None) -> Iterator[None]:
    """Say what a command is doing, where that takes longer than so many seconds."""
    timer = Timer(seconds, lambda: print(f"still {doing}", file=to, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # no thread may run while processes are forked


def in_one_line(text: str) -> str:
    """Return a text as one line of a sensible length.

    Control characters, in a typed value perhaps, are written as ``\\n``. The middle of a text of
    more than 1,000 characters is left out.
    """
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return printable(text)


def printable(text: str, allowed: str = "") -> str:
    """Return a text without control characters, which could rule a terminal: as ``\\x1b``."""
    return "".join(c if c.isprintable() or c in allowed else repr(c)[1:-1] for c in text)


def end_now(code: int) -> NoReturn:
    """End this process though one of its threads may wait for another process, for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Guarded:
    """A text stream that drops output it cannot write, and resumes when it can.

    A run outlives its ssh session, the reader of its pipe and a full disk under its log. Python's
    own streams would raise OSError from the next ``print``, in the middle of a checkpoint, say.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError: it was closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


def _at_interrupt(handler: Any) -> None:
    """Set the handler of Ctrl-C, unless it is ignored, as in a shell's background."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def _leave(*_: Any) -> NoReturn:
    with suppress(OSError):
        os.write(2, b"error: interrupted\n")
    os._exit(130)
