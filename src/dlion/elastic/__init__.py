"""Workers that come and go during training, with torchft."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlion.elastic.worker import Elastic


def of(optimizer: Any) -> "Elastic | None":
    """Return the extension of an optimizer with ``manager=``; None without one."""
    from dlion.elastic.worker import Elastic

    return next((each for each in optimizer.extensions if isinstance(each, Elastic)), None)
