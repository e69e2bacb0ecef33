"""Triton compiles for a GPU that need not be there."""

from typing import Any


class NoDevice:
    """What Triton asks of a driver in order to compile."""

    def __init__(self, capability: int) -> None:
        """Stand for an NVIDIA GPU of a capability, 90 for 9.0."""
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)
