"""Locks that die with their holder.

A lock is ``flock`` on a file. The kernel frees it when the last process that holds it has ended,
however it ended; processes that a holder forks hold it too. Linux passes it on to an NFS server,
which frees it some time after a machine has died (its lease, often 90 s), unless the mount says
``local_lock``: then, as on Lustre with ``localflock``, it keeps out processes of the same machine
only.
"""

import contextlib
import errno
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dlion.suite.files import leads_to

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def holding(file: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock on a file inside; the file is made for it and removed at the end.

    Args:
        file: the file, in a folder that exists.
        patience: seconds to wait for a holder that is about to end.

    Raises:
        BlockingIOError: if another process holds it.
        OSError: if the file cannot be made.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            descriptor = _acquire(file)
            break
        except FileNotFoundError:  # the holder has just removed it, or the folder does not exist
            file.parent.stat()  # which raises in the second case, and else we try again
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    try:
        yield
    finally:
        if leads_to(file, descriptor):
            file.unlink()
        os.close(descriptor)


def _acquire(file: Path) -> int:
    """Return a descriptor of a file, made for it, that holds its lock until it is closed.

    Where a file system has no locks this is said, and the descriptor holds nothing.

    Raises:
        BlockingIOError: if another process holds the lock.
        FileNotFoundError: if its holder removed it meanwhile, or its folder does not exist.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        _lock(file, descriptor, fcntl.LOCK_EX)
        # between open and flock its holder may have removed the file: we hold the lock of a file
        # without a name then, while another process makes and locks one that has it
        if not leads_to(file, descriptor):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_held(file: Path) -> bool:
    """Whether a process holds the lock on a file."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        _lock(file, descriptor, fcntl.LOCK_SH)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _lock(file: Path, descriptor: int, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        print(
            f"warning: the file system of {file} has no locks ({error.strerror}): nothing keeps a"
            " second run out of that folder",
            file=sys.stderr,
        )
