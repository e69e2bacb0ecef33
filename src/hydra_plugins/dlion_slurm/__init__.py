"""SLURM as a Hydra launcher, in the namespace where Hydra looks for plugins."""

import subprocess
from collections.abc import Sequence

from hydra.core.utils import JobReturn

try:
    from hydra_plugins.hydra_submitit_launcher import submitit_launcher
except ModuleNotFoundError:  # without dlion[suite]; Hydra would warn of it in every program
    submitit_launcher = None

if submitit_launcher is not None:

    class CheckedSlurmLauncher(submitit_launcher.SlurmLauncher):
        """hydra-submitit-launcher's, which says in one sentence why a sweep cannot be submitted."""

        def launch(
            self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
        ) -> Sequence[JobReturn]:
            """Submit the jobs of a sweep, and wait for them.

            Raises:
                UserError: if sbatch refuses the jobs.
            """
            # imported here, as Hydra loads this module whenever it starts
            from submitit.core.utils import FailedJobError

            from dlion.errors import UserError

            try:
                return super().launch(job_overrides, initial_job_idx)
            except FailedJobError as error:
                if not isinstance(error.__cause__, subprocess.CalledProcessError):
                    raise  # a job failed, and not its submission
                said = str(error).strip().splitlines() or [str(error.__cause__)]
                raise UserError(
                    f"no job of the sweep was submitted ({said[-1]}): correct hydra.launcher.* and"
                    " type the command again"
                ) from error
