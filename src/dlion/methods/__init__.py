"""The optimizers: one class per method family, usable in anybody's training loop."""

from dlion.engine.optimizer import DistributedOptimizer
from dlion.methods.adm import DLionADM
from dlion.methods.demo import DeMo
from dlion.methods.dense import GAdamW, GLion
from dlion.methods.dlion import DLion, Signum
from dlion.methods.ef_sign import EF21Sign, EFSignSGD
from dlion.methods.lion_cub import LionCub
from dlion.methods.local import DiLoCo, LocalUpdate
from dlion.methods.muon import GMuon
from dlion.methods.onebit_adam import OneBitAdam
from dlion.methods.powersgd import PowerSGD
from dlion.methods.sparse import DGC, GradDrop
from dlion.methods.sparseloco import SparseLoCo
from dlion.methods.terngrad import TernGrad

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
