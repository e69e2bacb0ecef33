"""Let torchvision import beside a torch build that its compiled operators do not fit."""

import importlib.util
from pathlib import Path

import torch

_library: torch.library.Library | None = None


def declare_missing_operators() -> None:
    """Declare the schemas of ``torchvision::nms`` and ``qnms`` where the real ones cannot load.

    A CUDA build of torchvision beside a CPU build of torch fails on import with "operator
    torchvision::nms does not exist", and so do timm and transformers, which import it. The names
    are all that an import needs; calling them still fails. Where torchvision's library loads,
    nothing is done. Call this before importing torchvision, timm or transformers' models.
    """
    global _library
    spec = importlib.util.find_spec("torchvision")
    if _library is not None or spec is None or spec.origin is None:
        return
    try:
        for compiled in Path(spec.origin).parent.glob("_C*"):
            torch.ops.load_library(str(compiled))
    except OSError:
        _library = torch.library.Library("torchvision", "DEF")
        _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
