"""The optimizers: one class per method family, usable in anybody's training loop."""

from dlion.optim.adm import DLionADM
from dlion.optim.base import DistributedOptimizer
from dlion.optim.demo import DeMo
from dlion.optim.dense import GAdamW, GLion
from dlion.optim.dlion import DLion, Signum
from dlion.optim.ef_sign import EF21Sign, EFSignSGD
from dlion.optim.lion_cub import LionCub
from dlion.optim.local import DiLoCo, LocalUpdate
from dlion.optim.muon import GMuon
from dlion.optim.onebit_adam import OneBitAdam
from dlion.optim.powersgd import PowerSGD
from dlion.optim.sparse import DGC, GradDrop
from dlion.optim.sparseloco import SparseLoCo
from dlion.optim.terngrad import TernGrad

__all__ = [
    "DGC",
    "DLion",
    "DLionADM",
    "DeMo",
    "DiLoCo",
    "DistributedOptimizer",
    "EF21Sign",
    "EFSignSGD",
    "GAdamW",
    "GLion",
    "GMuon",
    "GradDrop",
    "LionCub",
    "LocalUpdate",
    "OneBitAdam",
    "PowerSGD",
    "Signum",
    "SparseLoCo",
    "TernGrad",
]
