"""Train one model on n workers that exchange packed messages.

    python train.py optimizer=dlion_mavo workers=8            # starts its own processes
    python train.py -m optimizer=g_lion,dlion_mavo seed=0,1,2 # every combination, one by one
    torchrun --nproc_per_node=4 train.py workers=8            # one of torchrun's processes
    srun --ntasks=4 python train.py workers=8                 # or of SLURM's

`python train.py --help` lists the settings; conf/ holds them.
"""

from dlion.suite import terminal

terminal.prepare()

import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from dlion.suite.arguments import errors_end_the_command  # noqa: E402

# should only the library be installed
with errors_end_the_command(), terminal.patience("loading Python's modules", 5, sys.stderr):
    import hydra  # this takes seconds
    from omegaconf import DictConfig

    from dlion.suite.launch import cli

CONF = Path(__file__).resolve().parent / "conf"


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(config: DictConfig) -> float | None:
    return cli.guarded(config)


if __name__ == "__main__":
    try:
        cli.run(main, CONF)
    finally:
        terminal.ignore_interrupts()
