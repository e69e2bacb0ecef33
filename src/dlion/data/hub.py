"""The Hugging Face hub, and the cache of what came from it."""

import socket
from functools import cache
from urllib.parse import urlparse
from urllib.request import getproxies


@cache
def use_the_cache_if_offline() -> None:
    """Without a hub the libraries take from their cache at once, instead of trying for a minute.

    To be called before anything is asked of the hub. The environment variable ``HF_HUB_OFFLINE``
    would come too late: it counts only where the libraries are imported.
    """
    import datasets
    from huggingface_hub import constants

    if not _answers(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def _answers(endpoint: str) -> bool:
    if getproxies().keys() & {"http", "https", "all"}:
        return True  # as far as can be told without a download
    hub = urlparse(endpoint)
    try:
        socket.create_connection(
            (hub.hostname or "", hub.port or (80 if hub.scheme == "http" else 443)), timeout=3
        ).close()
    except OSError:
        return False
    return True
