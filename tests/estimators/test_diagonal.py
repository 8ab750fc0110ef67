from __future__ import annotations

import pytest
import torch

from flatminima.estimators import diagonal
from flatminima.operators import as_operator
from tests.estimators.spectra import diag, indefinite, rng, rotated


@pytest.mark.parametrize("method", ["auto", "exact", "hutchinson"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_diagonal_of_a_diagonal_matrix_is_exact(method: str, dtype: torch.dtype) -> None:
    estimate = diagonal(diag(1, -2, 3, dtype=dtype), method=method, generator=rng(0))
    assert torch.equal(estimate.value, torch.tensor([1, -2, 3], dtype=dtype))
    assert torch.equal(estimate.stderr, torch.zeros(3, dtype=dtype))


def test_exact_diagonal_agrees_with_the_dense_one() -> None:
    M = rotated(indefinite(70))
    assert torch.allclose(diagonal(as_operator(M), method="exact").value, M.diagonal(), atol=1e-13)


def test_standard_error_of_every_entry_is_that_of_the_theory() -> None:
    M = rotated(indefinite())
    estimate = diagonal(as_operator(M), method="hutchinson", num_products=4000, generator=rng(0))
    variance = (M.square().sum(1) - M.diagonal() ** 2) / 4000
    assert torch.allclose(estimate.stderr, variance.sqrt(), rtol=0.1)


def test_rtol_bounds_the_norm_of_the_errors() -> None:
    estimate = diagonal(as_operator(rotated(indefinite())), method="hutchinson", rtol=0.1, generator=rng(0))
    assert estimate.converged
    assert torch.linalg.vector_norm(estimate.stderr) <= 0.1 * torch.linalg.vector_norm(estimate.value)


def test_zero_matrix_has_a_zero_diagonal() -> None:
    estimate = diagonal(as_operator(torch.zeros(4, 4)), method="hutchinson")
    assert estimate.converged
    assert not estimate.value.any()
