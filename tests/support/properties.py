"""Property tests for machines of any speed: hypothesis times neither examples nor drawing."""

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

__all__ = ["HealthCheck", "example", "given", "settings", "st"]

settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")
