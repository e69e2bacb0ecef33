"""What goes in is checked: every wrong input ends in one line, and leaves nothing behind."""

import json
import math
import shlex
from typing import Annotated, Any, Literal

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from pydantic import Field

import dlion
from dlion import values
from dlion.suite import settings
from dlion.suite.config import resolve
from dlion.suite.launch.arguments import Arguments
from dlion.suite.training.checkpoint import identity
from tests.conftest import ROOT
from tests.support.runs import TORCHRUN, python, train

pytestmark = pytest.mark.slow

# of every command, so that one that is accepted by mistake is soon over
QUICK = ["steps=1", "workers=1", "logger=none"]

COUNT, OR_NULL = "give a whole number, at least 1", ", or null"
BOOLEAN, NUMBER = "type true or false", "give a number"

WRONG = {
    # types of the run's own settings
    "workers=0": f"workers=0 is not possible: {COUNT}",
    "workers=2.5": COUNT,
    "workers=true": COUNT,
    "workers=null": "workers=null is not possible",
    "workers=two": COUNT,
    "\"workers='4'\"": "workers=4 is not possible",
    "workers=[4]": "workers=[4] is not possible",
    "workers=???": "workers has no value: give a whole number",
    "processes=0": COUNT + OR_NULL,
    "steps=0": f"steps=0 is not possible: {COUNT}, or null",
    "batch_size=0": COUNT,
    "accumulate=false": "accumulate=false is not possible",
    "precision=fp16": "(did you mean bf16?): choose float32, bf16_mixed, bf16 or bf16_stochastic",
    "precision=bf16_mix": "(did you mean bf16_mixed?)",
    "precision=16": "precision=16 is not possible",
    "seed=-1": "give a whole number, at least 0",
    "seed=x": "seed=x is not possible",
    "seed=9223372036854775808": "at least 0 (whole numbers below 2^63, others up to 3.4e+38)",
    "optimizer.lr=1e308": "at least 0 (whole numbers below 2^63, others up to 3.4e+38)",
    "device=gpu": "device=gpu is unknown (did you mean cpu?): choose cpu, cuda or null",
    "backend=mpi": "choose gloo, nccl or null",
    "overlap=maybe": f"overlap=maybe is not possible: {BOOLEAN}",
    "overlap=null": BOOLEAN,
    "bucket_cap_mb=abc": "bucket_cap_mb=abc is not possible: give a number, above 0, auto or null",
    "bucket_cap_mb=nan": NUMBER,
    "threads=1000": "at least 1 and at most 256",
    "participation=0": "give a number, above 0 and at most 1",
    "participation=true": "above 0 and at most 1",
    "local_steps=0": COUNT,
    "label_smoothing=2": "give a number, at least 0 and at most 1",
    "local_lr=0": "local_lr=0 is not possible: give a number, above 0",
    "faults=3": "--help faults",
    "faults.byzantine=-1": "at least 0",
    "faults.attack=lie": "faults.attack=lie is unknown: choose flip, random or stale",
    "faults.attack=randon": "(did you mean random?)",
    "faults.stale_steps=0": COUNT,
    "faults.drop=1": "at least 0 and below 1",
    "faults.deaths=-1": "at least 0",
    "faults.deaths=1 faults.away=never": "at least 0 and at most 1000000",
    "+faults.foo=3": "faults.foo is not a setting",
    "init_from=3": "init_from=3 is not possible",
    "init_from=/proc": "init_from=/proc holds no weights",
    "init_from=": "init_from= is not possible",
    "evaluate=true": "evaluate=true is not possible",
    "eval_every=0": COUNT,
    "eval_limit=0": COUNT + OR_NULL,
    "checkpoint_every=0.5": COUNT + OR_NULL,
    "resume=7": "resume=7 is not possible",
    "stop_after=0": COUNT,
    "max_restarts=-1": "at least 0",
    "elastic=true elastic.timeout=1e30": "at least 1 and at most 1000000",
    "timeout=10s": "give a whole number, at least 1 and at most 1000000",
    "timeout=9999999999999999999999": "at most 1000000",
    "nonfinite=ignore": "nonfinite=ignore is unknown: choose stop, skip or null",
    "box=on": BOOLEAN,
    "agreement=1": BOOLEAN,
    "profile=no": f"profile=no is not possible: {BOOLEAN}",
    "check_replicas_every=-1": "at least 0",
    # types of components
    "optimizer.lr=fast": "optimizer.lr=fast is not possible: give a number, at least 0",
    "optimizer.lr=null": NUMBER,
    "optimizer.lr=1e39": NUMBER,
    "optimizer.lr=99999999999999999999": NUMBER,
    "optimizer.lr=nan": "optimizer.lr=nan is not possible",
    "optimizer.betas=0.9": "optimizer.betas=0.9 is not possible: give two numbers, [B1, B2]",
    "optimizer.betas=[0.9]": "give two numbers",
    "optimizer.betas=[0.9,1]": "each at least 0 and below 1",
    "optimizer.weight_decay=null": "optimizer.weight_decay=null is not possible",
    "optimizer.weighted=no": f"optimizer.weighted=no is not possible: {BOOLEAN}",
    "optimizer.weighted=true optimizer.ties=zero": "weighted=true needs aggregation=mavo",
    "optimizer.weighted=true optimizer.exchange=grid": "weighted=true needs exchange=direct",
    "optimizer.exchange=ring": "give direct, grid, auto or the sizes of a grid, such as [4, 2]",
    "optimizer.exchange=[8]": "the sizes of a grid",
    "optimizer.exchange=[3,2] workers=8": "a grid of 8 workers has sizes whose product is 8",
    "optimizer.ties=first": "choose zero, plus, alternate, random or previous",
    "optimizer.aggregation=sum": "choose mavo or avg",
    "optimizer=lion_cub optimizer.bits=3": "choose 1, 2, 4 or 8",
    "optimizer=lion_cub optimizer.bits=true": "choose 1, 2, 4 or 8",
    "optimizer=lion_cub optimizer.scale=l2": "choose l1, max or geometric",
    "optimizer=lion_cub optimizer.momentum_sync=often": "at least 0, or exponential",
    "optimizer=lion_cub optimizer.headroom=true workers=8": "at most 7 workers",
    "optimizer=lion_cub optimizer.momentum_sync=5 optimizer.sync_until=0": COUNT,
    "optimizer=lion_cub optimizer.momentum_sync=5 optimizer.sync_pattern=zzz": "matches no para",
    "optimizer=dlion_adm optimizer.rise=0": "at least 1 and at most 32",
    "optimizer=dlion_adm optimizer.limit=0.5": "give a number, at least 1, or null",
    "optimizer=diloco optimizer.inner=adam": "give adamw, lion, muon, sgd or in Python a function",
    "optimizer=diloco optimizer.wire=fp8": "choose float32, bf16, int8 or sign",
    "optimizer=diloco local_steps=4": "type optimizer.local_steps=4 instead",
    "optimizer=demo optimizer.topk=0": COUNT,
    "optimizer=demo optimizer.value_bits=8": "choose 2, 16 or 32",
    "optimizer=sparseloco optimizer.decay=2": "at least 0 and at most 1",
    "optimizer=dgc optimizer.density=0": "above 0 and at most 1",
    "optimizer=g_muon optimizer.adjust_lr=rms": "choose match_rms_adamw or original",
    "optimizer=g_muon optimizer.ns_precision=fp16": "choose auto, bf16 or float32",
    "optimizer=sign_muon_mavo optimizer.rest=adamw": "rest=adamw needs aggregation=avg",
    "optimizer=sign_muon_avg optimizer.rest=sgd": "choose lion or adamw",
    "optimizer=powersgd optimizer.rank=0": COUNT,
    "optimizer=onebit_adam optimizer.warmup_steps=0": COUNT,
    "optimizer=dgc optimizer.clip_norm=0": "above 0, or null",
    "optimizer=terngrad optimizer.clip=-1": NUMBER,
    "optimizer=terngrad optimizer.momentum=1": "at least 0 and below 1",
    "+optimizer.seed=3": "optimizer.seed is not a setting",
    "model.dim=-4": f"model.dim=-4 is not possible: {COUNT}",
    "model.depth=100000": "at least 1 and at most 1000",
    "dataset=next_line model.num_hidden_layers=-1": "model.num_hidden_layers=-1 is not possible",
    "model.dim=64.0": COUNT,
    "model.dim=63": "model.dim=63 is not divisible by model.heads=4",
    "model.dropout=2": "at least 0 and below 1",
    "model.depth=null": COUNT,
    "model.patch_size=3": "choose one of 1, 2, 4, 8",
    "model=resnet18 model.architecture=vgg": "choose resnet18",
    "dataset=stdlib_text model=gpt_tiny model.modern=yes": BOOLEAN,
    "dataset=next_line model.hidden_size=wide": "Field 'hidden_size' expected int, got str",
    "dataset=stdlib_text model=gpt_tiny model.init_std=0": "above 0, or null",
    "dataset=stdlib_text model=vit_tiny": "type model=gpt_tiny",
    "dataset=stdlib_text dataset.context=0": COUNT,
    "dataset=stdlib_text dataset.max_bytes=-1": COUNT + OR_NULL,
    "dataset=stdlib_text dataset.sharding=dirichlet": "needs a label for each sample",
    "dataset=mnist5k dataset.augment=no": f"dataset.augment=no is not possible: {BOOLEAN}",
    "dataset=mnist5k dataset.augment=null": BOOLEAN,
    "dataset.validation=no": BOOLEAN,
    "dataset.sharding=even": "choose partition, contiguous, replicate or dirichlet",
    "dataset.sharding=dirichlet dataset.alpha=0": "dataset.alpha=0 is not possible",
    "dataset=cifar10 dataset.path=/nowhere": "dataset.path=/nowhere is not a folder",
    "dataset=cifar10 dataset.train_limit=0": COUNT + OR_NULL,
    "dataset=imagenet dataset.path=~no-one/x": "path=~no-one/x names an unknown user's home folder",
    "dataset=imagenet": "dataset=imagenet must be on a disk: type dataset.path=DIR",
    "dataset=imagenet dataset.path=. dataset.image_size=0": COUNT,
    "dataset=imagenet dataset.path=. dataset.image_size=1000000": "at most 16384",
    "dataset=imagenet dataset.path=. dataset.loaders=-1": "at least 0",
    "dataset=imagenet dataset.path=. dataset.mixup=-1": NUMBER,
    "dataset=imagenet dataset.path=. dataset.auto_augment=no": BOOLEAN,
    "schedule.final=abc": "schedule.final=abc is not possible: give a number",
    "schedule.final=5": "at least 0 and at most 1",
    "schedule.warmup_steps=-5": "at least 0",
    "network.rate=50": "give a rate such as 100mbit",
    "network.rate=fast": "network.rate=fast is not a rate",
    "logger=wandb logger.mode=on": "logger.mode=on is unknown",
    "logger=wandb logger.tags=baseline": "logger.tags=baseline is not possible: give a list",
    # values that are looked up
    "'seed=${nosuch}'": "seed=${nosuch} could not be resolved (Interpolation key 'nosuch'",
    "'seed=${oc.env:NOSUCH}'": "seed=${oc.env:NOSUCH} could not be resolved",
    "'seed=${seed}'": "seed=${seed} could not be resolved (Recursive interpolation detected)",
    "'seed=${optimizer}'": "seed={name: dlion_mavo",
    "'optimizer.lr=${nosuch:3}'": "optimizer.lr=${nosuch:3} could not be resolved",
    "optimizer=[g_lion,dlion_mavo]": "or optimizer=A,B and -m for all",
    "logger=[csv,tensorboard]": "is a list, of which one is taken: type logger=csv",
    "--config-dir own optimizer=bomb": "would stand for more than 1,000,000 characters",
    # what one setting says of another
    "workers=8 processes=3": "processes may be 1, 2, 4, 8",
    "workers=100000": "type workers=1397 or fewer",
    "batch_size=5000": "type batch_size=1397 or less, or fewer workers",
    "accumulate=64": "type accumulate=",
    "faults.byzantine=9": "faults.byzantine=9 exceeds workers=1: type faults.byzantine=1 or less",
    "box=true optimizer.weight_decay=0": "type optimizer.weight_decay=1",
    "agreement=true optimizer=g_lion": "optimizer=g_lion does not vote with the sign of momenta",
    "backend=nccl device=cpu": "type backend=gloo",
    "elastic=3": "--help elastic",
    "elastic.min_workers=0": COUNT,
    "elastic=true elastic.min_workers=9": "elastic.min_workers=9 exceeds workers=1",
    "elastic=true optimizer=dlion_adm": "its exchange keeps",
    "elastic=true participation=0.5": "that come and go (elastic.lighthouse=here): type participa",
    "elastic=true optimizer.exchange=auto": "for one number of workers",
    "elastic.lighthouse=nowhere": "elastic.lighthouse=nowhere is not an address: give HOST:PORT",
    "elastic.lighthouse=127.0.0.1:1": "no lighthouse there",
    "elastic.lighthouse=127.0.0.1:95046": "elastic.lighthouse=127.0.0.1:95046 is not an address",
    "faults.deaths=1": "restart all from the first step: type elastic=true, or checkpoint_every=20",
    "elastic=true faults.deaths=1": "and there is one: type workers=2 or more",
    "resume=/nowhere": "resume=/nowhere holds no checkpoint",
    # what has no effect without another
    "dataset.alpha=0.1": "with dataset.sharding=partition: type dataset.sharding=dirichlet",
    "-m dataset.alpha=0.1,1 seed=0,1": "dataset.alpha=0.1,1 has no effect with dataset.sharding",
    "steps=1 epochs=3": "epochs=3 has no effect with steps=1: type steps=null as well, or leave",
    "elastic.timeout=5": "no effect with elastic.lighthouse=null: type elastic.lighthouse=here",
    "faults.away=5": "no effect with faults.deaths=0.0: type faults.deaths=1 as well",
    "faults.attack=random": "has no effect with faults.byzantine=0",
    "faults.byzantine=1 faults.stale_steps=3": "has no effect with faults.attack=flip",
    "local_lr=0.1": "has no effect with local_steps=1",
    "init_from_except=head.*": "has no effect with init_from=null: type init_from=RUN as well",
    "optimizer=lion_cub optimizer.bits=1 optimizer.scale=max": "no effect with optimizer.bits=1",
    "optimizer=lion_cub optimizer.sync_rate=2": "no effect with optimizer.momentum_sync=0",
    "optimizer=dlion_avg optimizer.ties=zero": "no effect with optimizer.aggregation=avg",
    "optimizer=diloco optimizer.inner=sgd optimizer.betas=[0.9,0.99]": "type optimizer.inner=adamw",
    # names
    "optimizer=dlion": "(did you mean dlion_mavo?)",
    "optimizer=": "type optimizer=NAME",
    "optimizer=null": "type optimizer=NAME",
    "dataset=nosuch": "choose one of choices, cifar10",
    "model=vit_tinny": "(did you mean vit_tiny?)",
    "experiment=vote_atack": "(did you mean vote_attack?)",
    "experiment=cub_bits scale=full": "experiment=NAME_full the paper's",
    "experiment=dlion_cifar10 dataset.path=/nowhere": "/nowhere is not a folder",
    "experiment=dlion_imagenet_full": "dataset=imagenet must be on a disk: type",
    "experiment=dlion_theory seed=0,x": "seed=x is not possible",
    "optimzer=g_lion": "optimzer is not a setting (did you mean optimizer?)",
    "optimizer.lrr=1": "optimizer.lrr is not a setting (did you mean optimizer.lr?)",
    "-m optimizer=dlion_mavo,lion_cub optimizer.bits=4": "optimizer.bits is a setting of lion_cub"
    " and not of dlion_mavo: type +methods.lion_cub.bits=4 instead, or sweep over lion_cub alone",
    "-m model=linear,vit_tiny model.dim=32": "model.dim is a setting of vit_tiny and not of linear",
    "experiment=board_text optimizer.bits=4": "is a setting of lion_cub and not of the others",
    "lr=1e-3": "lr is not a setting (did you mean optimizer.lr?)",
    "optimizer.learning_rate=1e-3": "(did you mean optimizer.lr?)",
    "+foo=bar": "foo is not a setting",
    "+foo.bar=1": "foo.bar is not a setting",
    "+model.patchsize=3": "(did you mean patch_size?)",
    "methods.dlion_mavo.bits=3": "methods.dlion_mavo is not a setting",
    "+methods.dlion_mavo.bits=3": "methods.dlion_mavo.bits is not a setting of",
    "+experiment.steps=1": "experiment.steps is not a setting",
    "+optimizer.lr=1e-3": "optimizer.lr is there already: type optimizer.lr=1e-3, without +",
    "~optimizer": "type optimizer=NAME",
    "~logger": "type logger=NAME",
    "~seed": "type seed=VALUE",
    "model._target_=dlion.suite.models.vitt": "No module named 'dlion.suite.models.vitt'",
    "model._target_=null": "model._target_=null is not possible",
    "optimizer._target_=dlion.optim": "optimizer._target_=dlion.optim is no class or function",
    "~model.name": "model has no name",
    "optimizer.name=": "optimizer.name= is not possible: give a text",
    "optimizer.name=null": "optimizer.name=null is not possible",
    "optimizer.name=[1]": "optimizer.name=[1] is not possible",
    "network.name=???": "network.name has no value",
    "+optimizer._partial_=foo": "optimizer._partial_=foo is not possible: type true or false",
    "optimizer=g_muon optimizer.adamw_names=zzz": "adamw_names=zzz matches no parameter name",
    "optimizer=1.5": "optimizer=1.5 is not a file of conf/optimizer",
    "'model=${nosuch}'": "is not a file of conf/model",
    "dataset={}": "dataset={} is not a file of conf/dataset",
    f"model={'a' * 5000}": "is not a file of conf/model",
    f"seed={'a' * 5000}": " ... ",
    "~schedule.final": "type schedule.final=VALUE",
    "methods=3": "methods.dlion_mavo is a table of settings",
    "+methods.dlion_mavo=3": "type methods.dlion_mavo.KEY=VALUE",
    "model._target_=nosuch.Model": "No module named 'nosuch'",
    "hydra/launcher=nosuch": "choose one of basic, slurm, submitit_local, submitit_slurm",
    # the command line itself
    "--workers=4": "type workers=4",
    "--steps 5": "type steps=5",
    "--batch-size=4": "type batch_size=4",
    "workers 4": "type workers=4",
    "@file": "settings are not read from files",
    "optimizer=/etc/passwd": "optimizer=/etc/passwd is unknown",
    "optimizer@model=g_lion": "optimizer@model is not a setting (did you mean optimizer?)",
    "foo": "foo is not a setting of the form KEY=VALUE",
    "optimizer = g_lion": "leave out the spaces around =",
    "optimizer=[": "cannot read optimizer=[",
    "optimizer=a,b,": "type optimizer=a,b, or a value behind it",
    "output_dir=ü": "type 'output_dir=\"ü\"'",
    "seed=1,2": "add -m to run them all",
    "--config-dir nowhere": "--config-dir nowhere is not a folder",
    "--config-name nosuch": "leave it out",
    "--cfg nosuch": "choose from",
    "--experimental-rerun x": "type the command again",
    "hydra.verbose=3": "Hydra cannot read the command line",
    # where to
    "output_dir=": "output_dir= is not possible: give a folder",
    """'output_dir=" "'""": "is not possible: give a folder",
    "output_dir=null": "output_dir=null is not possible: give a folder",
    "output_dir=file": "output_dir=file is not writable",
    "output_dir=gone": "gone is a link to nowhere, which is not there",
    "output_dir=gone/below": "gone is a link to nowhere",
    "output_dir=s3://bucket/run": "is not possible: give a folder of this machine",
    f"init_from={'a' * 256}": "could not be read or written (File name too long)",
    f"dataset=images dataset.path={'a' * 256}": "is not a folder",
    "output_dir=file/below": "is not writable",
    """'output_dir="~no-one/x"'""": "output_dir=~no-one/x names an unknown user's home folder",
    f"output_dir={'a' * 256}": "is not writable (File name too long)",
    f"output_dir={'/'.join(25 * ['a' * 200])}": "is not writable (File name too long)",
    "output_dir=/proc/nope": "output_dir=/proc/nope is not writable",
    "hydra.run.dir=x": "type output_dir=x",
    # sweeps
    "-m optimizer=g_lion,2": "optimizer=g_lion,2 is not a file of conf/optimizer",
    "-m optimizer=g_lion,g_lyon": "optimizer=g_lyon is unknown (did you mean g_lion?)",
    "-m optimizer.lr=1e-3,nan": "optimizer.lr=nan is not possible",
    "-m optimizer='glob(dlion*)' steps=0": "steps=0 is not possible",
    "-m 'seed=interval(0,1)'": "seed=interval(0,1) has no end of values",
    "-m output_dir=x seed=0,1": "type hydra.sweep.dir=DIR",
    "-m hydra.sweep.dir= seed=0,1": "hydra.sweep.dir= is not possible",
    "-m hydra.sweep.dir=/proc/nope seed=0,1": "hydra.sweep.dir=/proc/nope is not writable",
    "-m experiment=vote_attack,vote_local": "one recipe at a time",
    "-m seed=0,1 hydra.sweep.subdir=same": "not a folder of its own for each of 2 runs",
    "-m seed=0,1 hydra.sweep.subdir=../up": "not a folder of its own",
    "-m seed=0,1 hydra.sweep.subdir=": "not a folder of its own",
    "-m seed='range(0)'": "seed=range(0) names no value: give a value or more",
    "-m optimizer='glob(zzz*)'": "optimizer=glob(zzz*) names no value: choose one of demo, dgc",
    "-m --config-dir own experiment=trials candidate=a,b": "optimizer.lr=fast is not possible",
    "-m --config-dir own experiment=trials candidate=a,zz": "candidate",
    "--config-dir own optimizer=list": "list.yaml, line 3 is not YAML (expected the node",
    "--config-dir own optimizer=tab": "tab.yaml, line 2 is not YAML (found character",
    "--config-dir own optimizer=twice": "twice.yaml, line 3 is not YAML (found duplicate key lr)",
    "--config-dir own optimizer=items": "choose a file of conf/optimizer with lines KEY: VALUE",
    "--config-dir own optimizer=latin": "latin.yaml is not text in UTF-8 (byte 15): save it as",
    "-m seed=0,1 hydra.sweep.dir=s3://x": "give a folder of this machine",
    "--config-dir own experiment=order candidate=a,b": "is defined before 'search: board'",
    "--config-dir own optimizer=lost": "the defaults of optimizer/lost.yaml: optimizer=nosuch is",
    "-m evaluate=nowhere,elsewhere": "evaluate=nowhere takes steps",
    "evaluate=nowhere experiment=vote_attack": "takes optimizer, faults.byzantine, seed",
    # files whose settings nothing would read
    **{
        f"--config-dir lost experiment={name}": reason
        for name, reason in {
            "bare": "experiment/bare.yaml puts its settings below experiment, where nothing reads"
            " them: make `# @package _global_` its first line",
            "package": "experiment/package.yaml puts its settings below trial",
            "base": "experiment/common/half.yaml puts its settings below common",
            "deep": "nothing reads what is below settings: write steps, workers at the beginning",
            "typo": "batchsize is not a setting (did you mean batch_size?)",
            "slash": "write override /dataset: NAME, with a slash",
            "word": "optimizer: g_lion chooses nothing in a file: write - override /optimizer",
        }.items()
    },
    "--config-dir lost -m experiment=bare seed=0,1": "make `# @package _global_` its first line",
    "--config-dir lost --help experiment=bare": "make `# @package _global_` its first line",
    "--config-dir lost +own=bare": "own/bare.yaml puts its settings below own",
    "--config-dir lost dataset=global": "dataset/global.yaml puts its settings into those of the",
    "--config-dir lost model=elsewhere": "settings into dataset, and model gets none: leave out",
    "--config-dir lost optimizer=deep": "the file of optimizer=deep, leave out the line optimizer:",
    "--config-dir taken": "optimizer/g_lion.yaml is not read, as conf/optimizer/g_lion.yaml comes",
    "hydra/launcher=slurm": "add -m",
    "experiment=": "experiment= names nothing",
    # what the data and the model allow together
    "model.dim=100000000": "parameters, which take",
    "dataset=next_line model=causal_lm model.architecture=bert +model.hidden_size=12"
    " +model.num_hidden_layers=1 dataset.context=16": "looks ahead: type +model.is_decoder=true",
    "model=resnet18 batch_size=2": "leave a worker batches of one: type a larger batch_size",
    # components of one's own
    "--config-dir own model=broken": "could not be imported (NameError: name 'nohing'",
    "--config-dir own model=moved": "No module named 'dlion.data', which is dlion.suite.data now",
    "model._target_=dlion.models.vitt": "No module named 'dlion.suite.models.vitt'",
    "--config-dir own model=typed model.width=wide": "model.width=wide is not possible",
    "--config-dir own model=typed +model.widht=3": "(did you mean width?)",
    "--config-dir own model=untyped model.size=3": "missing a required argument: 'shape'",
    "--config-dir own model=nothing": "model has no _target_",
}


GLOBAL = "# @package _global_\n"
LOST = {  # files whose settings nothing would read
    "lost/experiment/bare": "steps: 20\nworkers: 2\n",
    "lost/experiment/package": "# @package trial\nsteps: 20\n",
    "lost/experiment/base": f"{GLOBAL}defaults: [common/half]\nsteps: 20\n",
    "lost/experiment/common/half": "workers: 2\n",
    "lost/experiment/deep": f"{GLOBAL}settings:\n  steps: 20\n  workers: 2\n",
    "lost/experiment/typo": f"{GLOBAL}batchsize: 20\n",
    "lost/experiment/slash": f"{GLOBAL}defaults:\n  - override dataset: digits\nsteps: 20\n",
    "lost/experiment/word": f"{GLOBAL}optimizer: g_lion\n",
    "lost/own/bare": "steps: 20\n",
    "lost/dataset/global": f"{GLOBAL}name: global\n_target_: dlion.suite.data.digits\n",
    "lost/model/elsewhere": "# @package dataset\nname: x\n_target_: dlion.suite.models.linear\n",
    "lost/optimizer/deep": "optimizer:\n  name: deep\n  _target_: dlion.optim.DLion\n",
    "taken/optimizer/g_lion": "name: mine\n",
}
TRIALS = """\
# @package _global_
defaults:
  - override /dataset: digits
  - override /optimizer: g_lion
candidate: a
candidates:
  a: {lr: 0.1}
  b: {lr: fast}
methods:
  g_lion:
    lr: ${candidates.${candidate}.lr}
"""


@pytest.fixture(scope="module")
def answers(request, tmp_path_factory):
    """What train.py says to each selected wrong input, in a folder that it must leave as it was."""
    chosen = [getattr(item, "callspec", None) for item in request.session.items]
    lines = [spec.params["line"] for spec in chosen if spec and spec.params.get("line") in WRONG]
    lines = lines or [*WRONG]
    folder = tmp_path_factory.mktemp("folder")
    (folder / "file").write_text("")
    (folder / "gone").symlink_to("nowhere")
    (folder / "own_models.py").write_text(
        "from torch import nn\n"
        "def typed(data, width: int = 4): return nn.Linear(width, 10)\n"
        "def untyped(data, shape, size=2): return nn.Linear(size, shape)\n"
    )
    (folder / "broken_module.py").write_text("nohing\n")
    (folder / "moved_module.py").write_text("from dlion.data import Images\n")
    models = folder / "own" / "model"
    models.mkdir(parents=True)
    for name, text in (
        ("broken", "_target_: broken_module.model"),
        ("moved", "_target_: moved_module.model"),
        ("typed", "_target_: own_models.typed\nwidth: 4"),
        ("untyped", "_target_: own_models.untyped\nsize: 2"),
        ("nothing", "width: 4"),
    ):
        (models / f"{name}.yaml").write_text(f"name: {name}\n{text}\n")
    optimizers, recipes = folder / "own" / "optimizer", folder / "own" / "experiment"
    optimizers.mkdir()
    recipes.mkdir()
    for name, line in (("list", "lr: ["), ("tab", "\tlr: 1"), ("twice", "lr: 1\nlr: 2")):
        (optimizers / f"{name}.yaml").write_text(f"name: {name}\n{line}\n")
    (optimizers / "items.yaml").write_text("- lr: 1\n")
    (optimizers / "latin.yaml").write_bytes(b"name: bad\nlr: \xff\n")
    (recipes / "trials.yaml").write_text(TRIALS)
    order = "defaults:\n  - override /model: linear\n  - /search: board\ncandidate: a\n"
    (recipes / "order.yaml").write_text(f"# @package _global_\n{order}")
    (optimizers / "lost.yaml").write_text("defaults: [nosuch]\n")
    doubled = "".join(f"a{i}: ${{.a{i - 1}}}${{.a{i - 1}}}\n" for i in range(1, 40))
    (optimizers / "bomb.yaml").write_text(f"name: bomb\na0: text\n{doubled}")
    for name, text in LOST.items():
        file = folder / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    commands = [_quick(shlex.split(line)) for line in lines]
    (folder / "commands.json").write_text(json.dumps(commands))
    before = sorted(folder.rglob("*"))
    script = ROOT / "tests" / "launch" / "attempts.py"
    run = python(script, "commands.json", cwd=folder)
    assert run.returncode == 0, run.stderr
    left = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return dict(zip(lines, map(json.loads, run.stdout.splitlines()), strict=True)) | {
        "left": sorted(left) == before
    }


def _quick(words: list[str]) -> list[str]:
    """A command with settings that are soon over, where it does not have them itself."""
    typed = {word.lstrip("~+-").partition("=")[0] for word in words}
    more = [setting for setting in QUICK if setting.partition("=")[0] not in typed]
    if not typed & {"dataset", "experiment"}:
        more.append("dataset=digits")
    return words if "experiment" in typed else [*more, *words]


@pytest.mark.parametrize("line", WRONG)
def test_wrong_input_is_one_clear_line(answers, line):
    code, stderr = answers[line]
    assert WRONG[line] in stderr
    assert stderr.startswith("error: ") and len(stderr.splitlines()) == 1
    assert code == 2


def test_wrong_input_leaves_nothing_behind(answers):
    assert answers["left"]


def test_words_that_people_try_first():
    for words in (["help", "optimizer=dgc"], ["help", "seed"], ["version"]):
        option = python("train.py", f"--{words[0]}", *words[1:])
        word = python("train.py", *words)
        assert word.returncode == 0 and word.stdout == option.stdout
    assert python("train.py", "help").stdout.startswith("usage: python train.py")


def test_a_model_that_needs_values_may_see_single_samples(tmp_path):
    (tmp_path / "peeking.py").write_text(
        "from torch import nn\n"
        "class Peeking(nn.Linear):\n"
        "    def forward(self, x): return super().forward(x.flatten(1) * x.mean().item())\n"
        "def model(data): return Peeking(64, 10)\n"
    )
    own = [
        "model=linear",
        "model._target_=peeking.model",
        "batch_size=1",
        f"output_dir={tmp_path / 'run'}",
    ]
    train("dataset=digits", "steps=2", *own, env={"PYTHONPATH": str(tmp_path)}, code=0)


def test_a_sample_in_processes_of_its_own():
    for line in ("optimizer.lr=fast", "--workers=4", "-m seed=0,x"):
        run = train(*shlex.split(line), code=2)
        assert run.stderr.startswith("error: ") and len(run.stderr.splitlines()) == 1
        assert WRONG.get(line, "seed=x is not possible") in run.stderr


def test_where_slurm_is_not_installed_it_is_said(tmp_path):
    run = train("-m", "hydra/launcher=slurm", "seed=0,1", env={"PATH": str(tmp_path)}, code=2)
    assert "needs SLURM, but found no sbatch and no srun on this machine" in run.stderr
    assert run.stderr.count("\n") == 1


def test_a_sweep_is_not_started_by_torchrun():
    run = train("-m", "seed=0,1", under=TORCHRUN, code=None)
    assert "a sweep starts its own processes: type it without torchrun" in run.stderr


def test_a_folder_below_home_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        typed = Arguments(["output_dir=~/run"]).ordered()  # as shells other than bash leave it
        config = compose("config", overrides=typed, return_hydra_config=True)
    assert resolve(config, config.hydra).output_dir == str(tmp_path / "run")


def components():
    """Every file of conf/ that names a class or function, and the settings in it."""
    for group in ("optimizer", "model", "dataset", "logger"):
        for file in sorted((ROOT / "conf" / group).glob("*.yaml")):
            node = OmegaConf.load(file)
            node = node.get(group, node)
            if "_target_" in node:
                yield pytest.param(group, node, id=f"{group}={file.stem}")


@pytest.mark.parametrize(("group", "node"), components())
def test_every_setting_of_a_component_has_a_type_and_a_sentence(group, node):
    sources = [settings.locate(node._target_, group), settings.Samples]
    hints = {name: hint for source in sources for name, hint in values.parameters(source).items()}
    said = {name: text for source in sources for name, text in values.sentences(source).items()}
    for key in (key for key in node if key not in settings.SPECIAL):
        if key in hints:  # another one is passed on to a library
            assert hints[key] not in (Any, int, float) and said[key], key


def test_every_setting_of_a_run_has_a_type_a_sentence_and_a_value():
    config = OmegaConf.load(ROOT / "conf" / "config.yaml")
    kinds = (
        settings.Settings,
        settings.Faults,
        settings.Schedule,
        settings.Network,
        settings.Samples,
    )
    for kind in kinds:
        assert all(values.sentences(kind)[name] for name in values.parameters(kind))
    own = {
        key
        for key, hint in values.parameters(settings.Settings).items()
        if settings.component_of(hint) is None
    }
    assert own == set(config) - {"defaults", "methods", "hydra"}


def test_what_bits_depend_on_is_known_of_earlier_runs_too():
    recorded = OmegaConf.load(ROOT / "tests" / "training" / "earlier_config.yaml")
    earlier = {
        key: recorded[key] for key in recorded if key not in ("local_optimizer", "local_betas")
    }
    assert identity(OmegaConf.create(earlier)) == identity(recorded)


def test_help_says_what_can_be_typed():
    text = train("--help", code=0).stdout
    assert text.startswith("usage: python train.py")
    assert "optimizer=NAME" in text and "cub_bits, cub_bits_full" in " ".join(text.split())
    assert "batch_size=32" in text and "samples per worker and step" in text
    for words in (["--help", "optimizer=dgc"], ["optimizer=dgc", "--help"]):
        text = train(*words, code=0).stdout
        assert "optimizer.density=0.04" in text and "share of entries sent" in text
        assert "workers=8" not in text
    assert "faults.attack=flip" in train("--help", "faults", code=0).stdout
    assert train("--version", code=0).stdout == f"dlion {dlion.__version__}\n"
    assert "(did you mean dgc?)" in train("--help", "optimizer=dgcc", code=2).stderr


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (values.Count, "give a whole number, at least 1"),
        (values.Count | None, "give a whole number, at least 1, or null"),
        (bool, "type true or false"),
        (Literal["a", "b", "c"], "choose a, b or c"),
        (Literal["a", "b"] | None, "choose a, b or null"),
        (values.Whole | Literal["all"], "give a whole number, at least 0, or all"),
        (list[str], "give a list, [A, B, ...], each a text"),
        (tuple[int, int], "give a list of 2, each a whole number"),
        (Annotated[float, Field(gt=0, le=1)], "give a number, above 0 and at most 1"),
    ],
)
def test_a_type_in_words(hint, words):
    assert values.advice(hint) == words


def test_values_are_not_converted():
    for hint, wrong in ((int, True), (int, "4"), (int, 4.0), (float, True), (float, "0.5")):
        assert not values.accepts(hint, wrong)
    assert not values.accepts(float, math.nan) and not values.accepts(Literal[1, 2], True)
    assert values.accepts(int, 2**62) and not values.accepts(int, 2**63)
    assert not values.accepts(int, 0.5)
    assert values.accepts(float, 1) and values.accepts(tuple[float, float], [0, 0.5])
    assert values.accepts(torch.nn.Module, 3)  # nobody knows
