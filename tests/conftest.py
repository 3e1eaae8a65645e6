"""What all tests share: two pools of gloo ranks, and how many examples hypothesis draws."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from fdtensor.testing.fixtures import gloo_ranks  # noqa: F401  (a fixture)
from fdtensor.testing.pool import GlooPool

torch.set_num_threads(1)  # tensors are tiny: threads would only wait for each other

settings.register_profile(
    "fast",
    derandomize=True,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "deep",
    deadline=None,
    max_examples=1000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("FDTENSOR_PROFILE", "fast"))


@pytest.fixture(scope="session")
def pool4(gloo_ranks) -> GlooPool:  # noqa: F811
    """Four gloo ranks, started by the first test that runs something on them."""
    return gloo_ranks(4)


@pytest.fixture(scope="session")
def pool8(gloo_ranks) -> GlooPool:  # noqa: F811
    """Eight gloo ranks, started by the first test that runs something on them."""
    return gloo_ranks(8)
