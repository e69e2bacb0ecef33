"""Part ``nccl``: every method's exchanges through collectives, against those without."""

from argparse import Namespace

import torch.distributed as dist
from common import Row
from same_bits import METHODS, WORKERS, Case, run_case

from dlion.workers import Workers

BIG = {str(i): (512, 1024) for i in range(6)}  # long enough for one stream to overtake another


def check_methods(key: Row, args: Namespace) -> list[Row]:
    """Compare every method's parameters with those of exchanges inside one process."""
    own_group, _ = dist.new_subgroups(1)
    alone = Workers(local=WORKERS, group=own_group)
    spread_out = Workers.current(WORKERS // dist.get_world_size())
    rows = []
    for method in ("dlion_mavo", "dgc") if args.small else METHODS:
        chosen = [Case("some take part", method, partial=True, steps=2 if args.small else 6)]
        if not args.small:
            chosen.append(Case("all take part", method))
        if not args.small and method.startswith(("dlion", "lion_cub")):
            chosen.append(Case("long messages", method, {"bucket_cap_mb": 4}, shapes=BIG, steps=4))
        wrong = []
        for case in chosen:
            expected = run_case(case, alone, overlap=False, device=args.device)
            for overlap in (False, True):
                found = run_case(case, spread_out, overlap, args.device, travelling=True)
                if found != expected:
                    wrong.append(f"{case.name}{', overlap' * overlap}")
        rows.append({"case": method, "wrong": wrong, "met": not wrong})
    return rows
