from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_MNIST = Path(__file__).parents[3] / "shared" / "data" / "mnist.npz"


@pytest.fixture(autouse=True)
def _global_rng_is_left_alone() -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture(scope="session")
def mnist_path() -> Path:
    if not _MNIST.exists():
        pytest.skip("MNIST is not part of the project; put mnist.npz into shared/data beside the clone to run this test")
    return _MNIST
