from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatminima.estimators import frobenius_norm
from flatminima.operators import as_operator
from tests.estimators.spectra import diag, indefinite, rng, rotated


@pytest.mark.parametrize("method", ["auto", "exact", "hutchinson"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norm_of_a_diagonal_matrix_is_exact(method: str, dtype: torch.dtype) -> None:
    estimate = frobenius_norm(diag(3, -4, dtype=dtype), method=method, generator=rng(0))
    assert (float(estimate), float(estimate.stderr)) == (5, 0)
    assert estimate.value.dtype == dtype


def test_exact_norm_agrees_with_the_dense_one_after_n_products() -> None:
    M = rotated(indefinite(70))
    estimate = frobenius_norm(as_operator(M), method="exact")
    assert float(estimate) == pytest.approx(float(torch.linalg.matrix_norm(M)), rel=1e-13)
    assert estimate.num_products == 70


@pytest.mark.parametrize("probes", ["rademacher", "gaussian"])
def test_standard_error_is_that_of_the_delta_method(probes: str) -> None:
    M = rotated(indefinite())
    S = M @ M
    variance = 2 * (S.square().sum() - (S.diagonal().square().sum() if probes == "rademacher" else 0))
    expected = float((variance / 4000).sqrt()) / (2 * float(torch.linalg.matrix_norm(M)))
    estimate = frobenius_norm(as_operator(M), method="hutchinson", num_products=4000, probes=probes, generator=rng(0))
    assert float(estimate.stderr) == pytest.approx(expected, rel=0.05)


def test_rtol_bounds_the_error_of_the_norm_and_not_of_its_square() -> None:
    A = as_operator(rotated(torch.arange(1, 61, dtype=torch.float64) ** -0.75))
    estimate = frobenius_norm(A, method="hutchinson", rtol=0.02, generator=rng(0))
    assert 0.01 * estimate.value < estimate.stderr <= 0.02 * estimate.value


def test_auto_is_exact_where_that_is_cheaper() -> None:
    A = as_operator(rotated(torch.arange(1, 101, dtype=torch.float64) ** -1.0))
    assert frobenius_norm(as_operator(rotated(indefinite(64)))).method == "exact"
    switched = frobenius_norm(as_operator(rotated(indefinite(100))), rtol=1e-4, generator=rng(0))
    assert switched.method == "exact"
    assert switched.num_products < 200
    assert frobenius_norm(A, rtol=0.1, generator=rng(0)).method == "hutchinson"


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_squares_beyond_the_range_of_float32_do_no_harm(scale: float) -> None:
    estimate = frobenius_norm(as_operator(scale * torch.eye(100)), method="hutchinson", num_products=4)
    assert float(estimate) == pytest.approx(10 * scale, rel=1e-5)


def test_zero_matrix_has_norm_zero() -> None:
    estimate = frobenius_norm(as_operator(torch.zeros(3, 3)), method="hutchinson")
    assert (float(estimate), float(estimate.stderr), estimate.converged) == (0, 0, True)


@settings(max_examples=30, deadline=None)
@given(st.floats(-100, 100), st.integers(0, 1000))
def test_norm_is_absolutely_homogeneous(c: float, seed: int) -> None:
    A = as_operator(rotated(indefinite(10), seed))
    one, scaled = (frobenius_norm(B, method="hutchinson", num_products=6, generator=rng(seed)) for B in (A, c * A))
    assert math.isclose(float(scaled), abs(c) * float(one), rel_tol=1e-10, abs_tol=1e-12)
    assert math.isclose(float(scaled.stderr), abs(c) * float(one.stderr), rel_tol=1e-8, abs_tol=1e-12)
