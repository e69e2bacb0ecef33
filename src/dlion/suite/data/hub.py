"""The Hugging Face hub and its cache."""

import socket
from functools import cache
from urllib.parse import urlparse
from urllib.request import getproxies


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
