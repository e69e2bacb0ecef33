"""The Hugging Face hub and its cache."""

import errno
import socket
from functools import cache
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import getproxies

from dlion.errors import UserError

_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


@cache
def use_the_cache_if_offline() -> None:
    """Let the libraries read from their cache at once where no hub can be reached.

    On their own they try for a minute. Call this before anything is loaded. The environment
    variable ``HF_HUB_OFFLINE`` would come too late: it is read when the libraries are imported.
    """
    import datasets
    from huggingface_hub import constants

    if not _is_reachable(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def _is_reachable(endpoint: str) -> bool:
    if getproxies().keys() & {"http", "https", "all"}:
        return True  # only a download would show more
    hub = urlparse(endpoint)
    try:
        socket.create_connection(
            (hub.hostname or "", hub.port or (80 if hub.scheme == "http" else 443)), timeout=3
        ).close()
    except OSError:
        return False
    return True


def check_cache(error: BaseException | None) -> None:
    """Refuse a cache that ``datasets`` could not write, if that is why it could not read files.

    Raises:
        UserError: naming the cache.
    """
    import datasets

    cache = Path(datasets.config.HF_DATASETS_CACHE)
    while error is not None:
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            place = Path(error.filename or (cache if full else ""))
            if place.is_relative_to(cache) or cache.is_relative_to(place):
                raise UserError(
                    f"the cache of data sets, {cache}, could not be written ({error.strerror}): set"
                    " HF_HOME to a folder that can be"
                ) from error
        error = error.__cause__ or error.__context__
