"""What all tests share.

Hypothesis draws the same examples in every run, so that a failure is the change's; `make test-all` draws new ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")

_MNIST = Path(__file__).parents[2] / "shared" / "data" / "mnist.npz"


@pytest.fixture(scope="session")
def mnist_path() -> Path:
    if not _MNIST.exists():
        pytest.skip("MNIST is not part of the project; put mnist.npz into shared/data beside the clone to run this test")
    return _MNIST
