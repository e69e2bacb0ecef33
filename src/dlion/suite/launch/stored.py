"""The settings with which ``evaluate=RUN`` measures the model of a run again."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from dlion.errors import UserError
from dlion.suite.record.runs import load_run
from dlion.suite.settings import TRAITS, naming
from dlion.suite.training.weights import recorded_input, recorded_settings

_RECORDED = [name for name, traits in TRAITS.items() if traits.evaluated]
_ALLOWED = [  # beside evaluate=RUN
    *(f"{name}.{key}" for name, traits in TRAITS.items() for key in traits.typed_keys),
    *(name for name, traits in TRAITS.items() if traits.typed),
]


def settings_of_run(config: DictConfig, typed: Sequence[str]) -> DictConfig:
    """Return the settings to measure the model of the run ``config.evaluate``.

    Args:
        config: the settings of this command; what a run did not record, or does not matter to a
            measurement, is taken from it.
        typed: the overrides of this command, which replace recorded settings.

    Raises:
        UserError: if the run or model does not exist, or a typed setting belongs to the run.
    """
    keys = [override.lstrip("+~").partition("=")[0] for override in typed]
    keys = [key for key in keys if key != "evaluate"]
    if foreign := [key for key in keys if key not in _ALLOWED]:
        raise UserError(
            f"evaluate={config.evaluate} takes {', '.join(foreign)} from the run: beside it only"
            f" {', '.join(_ALLOWED)} may be typed"
        )
    given = [key.partition(".")[0] for key in keys if key.endswith("._target_")]
    with naming(config, "evaluate"):
        run = load_run(Path(config.evaluate).expanduser())
        recorded = recorded_settings(run, _RECORDED, given)
    recorded["device"] = run.summary.get("device")
    if recorded.get("dataset", {}).get("image_size", 0) is None:  # other pictures may have another
        recorded["dataset"]["image_size"] = getattr(
            recorded_input(run.directory), "image_size", None
        )
    settings = OmegaConf.create(OmegaConf.to_container(config) | recorded)
    for key in keys:
        OmegaConf.update(settings, key, OmegaConf.select(config, key))
    OmegaConf.set_struct(settings, True)
    return settings
