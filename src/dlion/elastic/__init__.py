"""Workers that come and go during training, with torchft."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlion.elastic.worker import Elastic


def check_method(optimizer: Any) -> None:
    """Refuse a method whose settings hold for one number of workers alone, or whose state moves.

    It says so itself, where it has a ``check_elastic()`` that raises ValueError.
    """
    check = getattr(optimizer, "check_elastic", None)
    if check is not None:
        check()


def of(optimizer: Any) -> "Elastic | None":
    """Return the extension of an optimizer with ``manager=``; None without one."""
    from dlion.elastic.worker import Elastic

    return next((each for each in optimizer.extensions if isinstance(each, Elastic)), None)
