"""The model and the optimizer of a run, made in each of its processes."""

import math
from typing import Any

import torch
from torch import nn

from dlion.errors import TrainingFailed
from dlion.methods import METHODS
from dlion.methods.groups import param_groups
from dlion.methods.muon import MatricesApart
from dlion.optim import DistributedOptimizer
from dlion.streams import stream_seed
from dlion.suite import models
from dlion.suite.config import instantiate
from dlion.suite.data import Text
from dlion.suite.models.causal import check_causal
from dlion.suite.training.job import Job
from dlion.suite.training.precision import in_precision
from dlion.suite.training.weights import load_weights


def make_model(job: Job) -> nn.Module:
    """Return the model as training starts with it, equal in all processes."""
    config = job.config
    torch.manual_seed(stream_seed(config.seed, "initialisation"))
    model = in_precision(models.build(config.model, job.data), config.precision, job.device)
    if config.init_from is not None:  # a checkpoint lacks what is frozen
        load_weights(model, config.init_from, config.init_from_except)
    if isinstance(job.data, Text):
        check_causal(model, job.data.vocabulary, job.data.context, job.device)
    return model.train()


def parameters_of(model: nn.Module, optimizer: Any) -> Any:
    """Return a model's parameters as an optimizer of these settings takes them."""
    method = METHODS.get(optimizer.name)
    by_modules = method is not None and issubclass(method.cls, MatricesApart)
    if by_modules and optimizer.get("inner", "muon") == "muon":
        return param_groups(model)
    return model.named_parameters()


def make_optimizer(job: Job, model: nn.Module, **participants: Any) -> DistributedOptimizer:
    """Return the optimizer for the workers that ``workers`` or ``manager`` names."""
    config = job.config
    return instantiate(
        config.optimizer,
        parameters_of(model, config.optimizer),
        seed=config.seed,
        overlap=config.overlap,
        bucket_cap_mb=config.bucket_cap_mb,
        nonfinite=config.nonfinite,
        stochastic_rounding=config.precision == "bf16_stochastic",
        **participants,
    )


@torch.no_grad()
def check_finite(job: Job, model: nn.Module, test_loss: float) -> None:
    """Refuse to finish with a model that the last steps have made infinite or NaN.

    Raises:
        TrainingFailed: in that case, unless ``nonfinite`` allows it.
    """
    if job.config.nonfinite is None:
        return
    finite = torch.stack([p.detach().isfinite().all() for p in model.parameters()])
    if not (math.isfinite(test_loss) and finite.all()):
        raise TrainingFailed(
            "the model is not finite after the last step, as it has diverged: type a smaller"
            " optimizer.lr, or nonfinite=null to keep it"
        )
