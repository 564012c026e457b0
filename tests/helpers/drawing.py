"""Settings of tests that draw: the same draws whatever else is imported, nothing on the disk."""

import os
from pathlib import Path

from hypothesis import HealthCheck, configuration, settings
from hypothesis.internal.conjecture import providers

from helpers.spread import ALL

# What hypothesis keeps of Unicode; by default in the working directory.
configuration.set_hypothesis_home_dir(Path(os.environ["XDG_CACHE_HOME"]) / "hypothesis")
# It would mix constants of every module that is imported into its draws.
providers._get_local_constants = lambda: providers._local_constants


def drawing(quick, *, every=2000):
    """Settings of a test with ``every`` draws where all are asked for, else ``quick`` of them."""
    return settings(
        max_examples=every if ALL else quick,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
