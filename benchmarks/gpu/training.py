"""Part ``train``: whole steps of ViT-B/16 and GPT-2 on random data."""

from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from common import Row, ratios
from torch import Tensor
from torch.nn import functional as F

from dlion import optim
from dlion.suite.training.precision import in_precision
from gpu.timing import Call, timed_in_turn

LR, DECAY = 1e-4, 0.1


def prepare() -> None:
    """Import what takes seconds, once for all processes."""
    with suppress(ModuleNotFoundError):  # without the suite, torchvision has to fit torch
        from dlion.suite.data.torchvision_ops import declare_missing_operators

        declare_missing_operators()
    import timm  # noqa: F401
    from transformers import GPT2LMHeadModel  # noqa: F401


def make_vit(batch: int, small: bool) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """Return ViT-B/16 of timm, and a batch of images."""
    import timm

    size = 32 if small else 224
    tiny = {"embed_dim": 32, "depth": 1, "num_heads": 2} if small else {}
    model = timm.create_model("vit_base_patch16_224", img_size=size, **tiny)
    return model, torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))


class Logits(torch.nn.Module):
    """A language model of transformers that returns its logits only."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits


def make_gpt2(batch: int, small: bool) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """Return GPT-2 medium of transformers without dropout, and a batch of sequences."""
    from transformers import GPT2Config, GPT2LMHeadModel

    context, vocabulary = (16, 64) if small else (1024, 50257)
    layers, width, heads = (1, 32, 2) if small else (24, 1024, 16)
    dropout = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=context,
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        bos_token_id=0,
        eos_token_id=0,
        **dropout,
    )
    model = Logits(GPT2LMHeadModel(config))
    return model, *torch.randint(vocabulary, (2, batch, context)).unbind()


MODELS = {"ViT-B/16": (make_vit, 64), "GPT-2 345M": (make_gpt2, 8)}  # batches of all processes


def measure_training(key: Row, args: Namespace) -> list[Row]:
    """Time whole steps, each method with a model of its own; AdamW without DDP."""
    make, batch = MODELS[key["model"]]
    batch //= (16 if args.small else 1) * dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    model, *data = make(max(batch, 1), args.small)
    inputs, labels = (part.to(args.device) for part in data)
    losses: dict[str, list[Tensor]] = {}
    parameters: dict[str, list[Tensor]] = {}

    def stepper(name: str, make: Callable[..., torch.optim.Optimizer]) -> dict[str, Call]:
        own = in_precision(deepcopy(model), "bf16_mixed", args.device)
        parameters[name], losses[name] = list(own.parameters()), []
        optimizer = make(own.parameters(), lr=LR, weight_decay=DECAY)
        if isinstance(optimizer, optim.DistributedOptimizer):
            optimizer.channel.alone = False  # one process sends its messages through NCCL, too

        def step() -> None:
            loss = F.cross_entropy(own(inputs).flatten(0, -2).float(), labels.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.detach())

        return {"step": step}

    adamw = "AdamW, fused, alone"
    makers: dict[str, Any] = {
        adamw: partial(torch.optim.AdamW, fused=True),
        "dlion_mavo": optim.DLion,
        "dlion_mavo, overlap": partial(optim.DLion, overlap=True, bucket_cap_mb=25),
        "dlion_mavo, overlap, 100 MB": partial(optim.DLion, overlap=True, bucket_cap_mb=100),
    }
    times = timed_in_turn({name: stepper(name, make) for name, make in makers.items()}, args)
    memory = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else None
    rows = []
    for name, found in times.items():
        first, last = losses[name][0].item(), losses[name][-1].item()
        equal = name == adamw or equal_everywhere(parameters[name])
        rows.append(
            {
                "case": name,
                **found.row(),
                "over_adamw": ratios(found.device, times[adamw].device),
                "losses": [first, last],
                "parameters": sum(tensor.numel() for tensor in parameters[name]),
                "gib_of_all": memory,
                "met": equal and last < first < inf,
            }
        )
    return rows


def equal_everywhere(parameters: list[Tensor]) -> bool:
    """Whether all processes hold the same bits."""
    sums = torch.stack([p.detach().view(torch.int32).sum() for p in parameters]).tolist()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sums)
    return all(other == sums for other in everyone)
