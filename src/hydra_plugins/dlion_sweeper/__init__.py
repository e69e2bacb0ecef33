"""A Hydra sweeper, in the namespace where Hydra looks for plugins; hydra/sweeper=quick."""

import itertools
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf


class QuickSweeper(BasicSweeper):
    """Hydra's sweeper over all combinations, with a faster check before anything is written.

    A recipe with a table ``methods`` sweeps over them, unless it or the command names others.

    Hydra composes every run. Here each value is checked once. A composition is needed for another
    file of conf/ or another value of a setting that others look up, such as ``candidate``, and for
    each combination of these: a sweep over 3 methods, 4 numbers of workers and 10 seeds costs 3
    instead of 120.
    """

    def sweep(self, arguments: list[str]) -> Any:
        """Run every combination, if all of them can be run.

        Raises:
            UserError: one sentence about the first wrong value.
            HydraException: about a file or a setting that does not exist.
        """
        # imported here, as Hydra loads this module whenever it starts
        from dlion.errors import UserError
        from dlion.suite.launch.environment import detect
        from dlion.suite.launch.resume import make_sweep_dir
        from dlion.values import Folder, refusal, show

        assert self.hydra_context is not None and self.config is not None
        if (started := detect()) is not None:
            raise UserError(f"a sweep starts its own processes: type it without {started.source}")
        launcher = self.config.hydra.runtime.choices["hydra/launcher"]
        missing = [program for program in ("sbatch", "srun") if shutil.which(program) is None]
        if "slurm" in launcher and missing:
            raise UserError(
                f"hydra/launcher={launcher} needs SLURM, but found no {' and no '.join(missing)}"
                " on this machine: type it on one from which jobs are submitted, or"
                " hydra/launcher=basic to run the sweep here"
            )
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        self.params = {key: value for key, value in self.params.items() if value != ""}
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        for override in overrides:
            if override.key_or_group == "output_dir":
                raise UserError(
                    "output_dir is that of a single run: type hydra.sweep.dir=DIR, where each run"
                    " of the sweep gets a folder"
                )
            if override.is_sweep_override() and not override.is_discrete_sweep():
                raise UserError(
                    f"{override.input_line} has no end of values: list them,"
                    f" {override.key_or_group}=A,B,C, or type range(START,STOP,STEP)"
                )
        if methods := methods_of(self.config, overrides, self._compose):
            self.params = {"optimizer": ",".join(methods), **self.params}
            overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        self.config.hydra.sweeper.params = self.params  # multirun.yaml has all that is varied
        (batch,) = self.split_arguments(overrides, None)
        for override in overrides if not batch else ():
            if override.is_sweep_override() and not [*override.sweep_string_iterator()]:
                known = self.hydra_context.config_loader.get_group_options(override.key_or_group)
                choice = f"choose one of {', '.join(known)}" if known else "give a value or more"
                raise UserError(f"{override.input_line} names no value: {choice}")
        print(f"{len(batch)} run{'s' * (len(batch) > 1)}", flush=True)
        varied = {each.key_or_group for each in overrides if each.is_sweep_override()}
        self._check(batch, arguments, varied)
        if wrong := refusal(directory := self.config.hydra.sweep.dir, Folder):
            raise UserError(f"hydra.sweep.dir={show(directory)} {wrong}")
        _check_subdir(self.config, len(batch))
        make_sweep_dir(Path(self.config.hydra.sweep.dir))
        results = super().sweep(arguments)
        if launcher != "basic":  # their output is in files
            for job in itertools.chain.from_iterable(results):
                print(f"{job.hydra_cfg.hydra.runtime.output_dir}: {show(job.return_value)}")
            print(f"test accuracy, or loss; to compare them: dlion table {directory}")
        return results

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Do nothing, as all batches were checked together."""

    def _compose(self, overrides: Sequence[str]) -> DictConfig:
        assert self.hydra_context is not None and self.config is not None
        return self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))

    def _check(
        self, batch: Sequence[Sequence[str]], typed: Sequence[str], varied: Collection[str]
    ) -> None:
        """Check every value of the sweep, each in a combination that will be run.

        Args:
            batch: the overrides of every run.
            typed: what was typed, without what the recipe varies.
            varied: settings and groups with several values.
        """
        from dlion.errors import UserError
        from dlion.suite.config import looked_up, resolve
        from dlion.suite.launch.check import check_settings, load_data
        from dlion.suite.launch.stored import settings_of_run
        from dlion.suite.settings import check_effects

        assert self.hydra_context is not None and self.config is not None
        loader = self.hydra_context.config_loader
        runs_here = self.config.hydra.runtime.choices["hydra/launcher"] == "basic"
        parse = OverridesParser.create().parse_overrides
        groups = {
            value.key_or_group
            for value in parse(list(batch[0]))
            if loader.get_group_options(value.key_or_group)
        }
        sweep_dir = OmegaConf.to_container(self.config.hydra.sweep, resolve=False)["dir"]
        settings, checked, downloaded = None, set[str](), dict[str, DictConfig]()
        config, composed = self._compose(batch[0]), set[tuple[str, ...]]()
        # without output_dir, as a sweep has folders of its own
        names = [name for name in config if name not in ("hydra", "output_dir")]
        words = looked_up(OmegaConf.masked_copy(config, names))

        def others_depend_on(key: str) -> bool:
            above = itertools.accumulate(key.split("."), lambda left, right: f"{left}.{right}")
            return key in groups or not words.isdisjoint([*above, key.rpartition(".")[2]])

        for overrides in batch:
            values = parse([override for override in overrides if override not in checked])
            if checked and any(value.key_or_group == "experiment" for value in values):
                raise UserError("one recipe at a time: type experiment=NAME once, without commas")
            deciding = tuple(
                o for o in overrides if others_depend_on(o.partition("=")[0].lstrip("+~"))
            )
            if anew := settings is None or deciding not in composed:
                composed.add(deciding)
                config = self._compose(overrides)
                settings = resolve(config, config.hydra)
            for value in values:
                if value.key_or_group not in groups:
                    OmegaConf.update(settings, value.key_or_group, value.value(), force_add=True)
            if settings.resume == "auto" and "${now:" in sweep_dir:
                raise UserError("resume=auto needs the sweep's folder: type hydra.sweep.dir=DIR")
            if settings.evaluate is not None:
                settings_of_run(settings, overrides)
            elif values or anew:
                check_settings(settings, data_is_here=runs_here)
                if settings.dataset.get("path", "") is None:
                    downloaded[settings.dataset.name] = settings.dataset.copy()
            if not checked:
                check_effects(settings, typed, varied)
            checked.update(overrides)
        for dataset in downloaded.values() if runs_here else ():
            load_data(dataset)


def _check_subdir(config: DictConfig, runs: int) -> None:
    """Refuse folders that several runs of a sweep would share, or that are not in the sweep's.

    Raises:
        UserError: what to type instead.
    """
    from dlion.errors import UserError

    subdir = str(OmegaConf.to_container(config.hydra.sweep, resolve=False)["subdir"])
    outside = ".." in Path(subdir).parts or Path(subdir).is_absolute()
    if outside or (runs > 1 and "${" not in subdir):
        raise UserError(
            f"hydra.sweep.subdir={subdir} is not a folder of its own for each of {runs} runs: leave"
            " it out, or type 'hydra.sweep.subdir=${hydra.job.num}'"
        )


def methods_of(
    config: DictConfig,
    overrides: list[Override],
    compose: Callable[[Sequence[str]], DictConfig],
) -> list[str]:
    """Return the methods in the table of a sweep's recipe.

    Args:
        config: of the sweep.
        overrides: all that is varied or typed.
        compose: returns the configuration of one run: a table may depend on swept values, and that
            of the first ones counts.
    """
    if OmegaConf.is_interpolation(config, "methods"):
        config = compose(QuickSweeper.split_arguments(overrides, None)[0][0])
    table = config.get("methods")
    return list(table) if isinstance(table, DictConfig) else []
