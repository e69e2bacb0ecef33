"""From a config node to the object it describes."""

from typing import Any

import hydra


def make(node: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the ``_target_`` of a node with its other values; ``name`` is for the records.

    Unlike hydra.utils.instantiate on its own, errors of the target arrive as they are.
    """
    options = {key: value for key, value in node.items() if key != "name"}
    return hydra.utils.instantiate(options, _partial_=True)(*args, **kwargs)
