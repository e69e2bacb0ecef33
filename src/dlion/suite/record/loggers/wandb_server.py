"""Whether Weights & Biases can be reached: its server and key are where wandb itself has them."""

import ssl
import threading
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener, getproxies

_PATIENCE = 2.0  # seconds for which the server may be silent


def why_not_sync() -> str | None:
    """Say why nothing can be sent, with the settings of the moment; not while a run is shown."""
    import wandb

    wandb.teardown()  # it reads settings once, and they may be others now
    return obstacle(wandb.setup().settings)


def obstacle(settings: Any) -> str | None:
    """Say why nothing can be sent to the server of wandb's settings; None: nothing is known.

    Whether the server takes the key is not asked: only wandb itself shows it the key.
    """
    if not has_key(settings):
        return f"there is no key for {settings.base_url}: type `wandb login`"
    if not _answers(settings):
        return f"{settings.base_url} does not answer"
    return None


def has_key(settings: Any) -> bool:
    """Whether wandb finds a key for its server: in the environment, its settings, or netrc."""
    from wandb.errors import AuthenticationError
    from wandb.sdk.lib import wbauth

    if settings.api_key or settings.identity_token_file:
        return True
    try:
        return wbauth.read_netrc_auth(host=settings.base_url) is not None
    except AuthenticationError:
        return True  # it is no good, which wandb says when the run starts


def _answers(settings: Any) -> bool:
    """Whether anything speaks HTTP there, through the proxies that wandb would use.

    It is asked in a thread of its own, as nothing else bounds the time to look up a name.
    """
    own = {"http": settings.http_proxy, "https": settings.https_proxy}
    proxies = getproxies() | {scheme: proxy for scheme, proxy in own.items() if proxy}
    opener = build_opener(ProxyHandler(proxies))
    answered = []

    def ask() -> None:
        try:
            opener.open(settings.base_url, timeout=_PATIENCE).close()
        except HTTPError:
            pass  # an answer, too
        except URLError as error:
            if not isinstance(error.reason, ssl.SSLCertVerificationError):  # wandb may know it
                return
        except (OSError, HTTPException):
            return
        answered.append(True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return bool(answered)
