"""What train.py and its neighbours import sooner or later, imported at once: see tests/warm.py.

Building a model on the meta device imports much of torch's compiler, which takes longest.
"""

import importlib

import torch

from dlion.data.torchvision_ops import declare_missing_operators

declare_missing_operators()
for name in (
    *("dlion.launch", "dlion.kernels.numba_cpu", "dlion.compare.plot", "dlion.compare.publish"),
    *("dlion.compare.report", "datasets", "mlxtend.data", "sklearn.datasets", "timm"),
    *("lion_pytorch", "torch.nn.parallel.distributed"),
    *("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"),
):
    importlib.import_module(name)
with torch.device("meta"):
    torch.nn.init.trunc_normal_(torch.ones(2, 2) * 2)
