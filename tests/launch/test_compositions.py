"""What these tests remember of Hydra's compositions is what Hydra composes."""

import shlex

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.types import RunMode
from omegaconf import OmegaConf

from dlion.suite.launch.help import opened
from tests.support.compositions import CONF


@pytest.mark.parametrize(
    "line",
    [
        "",
        "optimizer=lion_cub optimizer.bits=2 seed=3",
        "dataset=stdlib_text model=gpt_tiny workers=8 +model.unknown=1",
        "optimizer=dlion_mavo ~optimizer.weight_decay output_dir=here",
        "experiment=board_text optimizer=g_muon steps=3",
        "schedule=constant hydra.job.chdir=true 'model.dim=${workers}'",
        "hydra/launcher=slurm optimizer=g_lion,dlion_mavo seed=0,1",
    ],
)
def test_what_is_remembered_is_what_hydra_composes(line):
    words = shlex.split(line)
    mode = RunMode.MULTIRUN if "," in line else RunMode.RUN
    remembered = ConfigLoaderImpl._load_configuration_impl
    with opened(CONF, None) as loader:
        found = [
            OmegaConf.to_container(
                method(loader, "config", words, mode, validate_sweep_overrides=False)
            )
            for method in (remembered, remembered, remembered.__wrapped__)
        ]
    assert found[0] == found[1] == found[2]
