"""Random streams that depend on their names alone: (seed, purpose, worker, step).

A draw can be repeated from these four, so a run is the same however its workers are spread
over processes, and resuming needs no saved generator state.
"""

import zlib

import numpy as np
import torch


def stream_seed(seed: int, purpose: str, *ids: int) -> int:
    """Return a 63-bit seed; those of two names are independent for all practical purposes."""
    entropy = [seed, zlib.crc32(purpose.encode()), *ids]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 1


def stream(
    seed: int, purpose: str, *ids: int, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Return a new generator at the beginning of the stream of that name."""
    return torch.Generator(device=device).manual_seed(stream_seed(seed, purpose, *ids))
