from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flatminima.estimators import trace
from flatminima.estimators.sampling import Plan, draw_probes
from flatminima.operators import as_operator
from tests.estimators.spectra import decaying, indefinite, rng, rotated

D64 = torch.float64


def transcription(M: Tensor, omega: Tensor) -> Tensor:
    """Return the leave-one-out estimates (m,), each by itself."""
    n, m = omega.shape
    estimates = []
    for i in range(m):
        Q = torch.linalg.qr(M @ omega[:, [k for k in range(m) if k != i]])[0]
        w = omega[:, i] - Q @ (Q.T @ omega[:, i])
        estimates.append((Q * (M @ Q)).sum() + w @ M @ w * (n - m + 1) / (w @ w))
    return torch.stack(estimates)


@pytest.mark.parametrize("spectrum", [decaying(60), indefinite(60)])
def test_it_is_the_naive_transcription_and_so_is_its_standard_error(spectrum: Tensor) -> None:
    M, m = rotated(spectrum), 7
    omega = draw_probes(as_operator(M), m, Plan.checked(probes="gaussian", generator=rng(0)))
    alone, covariance = transcription(M, omega), torch.zeros((), dtype=D64)
    for i in range(m):
        for j in range(m):
            if i != j:
                without = [transcription(M, omega[:, [k for k in range(m) if k != other]]) for other in (j, i)]
                at = [i - (i > j), j - (j > i)]
                covariance += (alone[i] - without[0][at[0]]) * (alone[j] - without[1][at[1]])
    estimate = trace(as_operator(M), method="xtrace", num_products=2 * m, generator=rng(0))
    assert float(estimate) == pytest.approx(float(alone.mean()), rel=1e-10)
    variance = alone.var() / m + (covariance / (m * (m - 1))).clamp_min(0)
    assert float(estimate.stderr) == pytest.approx(float(variance.sqrt()), rel=1e-6)
    assert (estimate.num_products, estimate.num_samples) == (2 * m, m)


def test_growing_in_steps_gives_what_one_step_gives() -> None:
    A = as_operator(rotated(decaying(200)))
    whole = trace(A, method="xtrace", num_products=100, generator=rng(0))
    grown = trace(A, method="xtrace", rtol=1e-9, max_products=100, generator=rng(0))
    assert not grown.converged
    assert float(grown) == pytest.approx(float(whole), rel=1e-9)
    assert float(grown.stderr) == pytest.approx(float(whole.stderr), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, D64])
def test_a_matrix_of_low_rank_is_exact_up_to_rounding(dtype: torch.dtype) -> None:
    M = rotated([3.0, 2.0, -1.0, 0.5, *[0.0] * 96])
    estimate = trace(as_operator(M.to(dtype)), method="xtrace", num_products=20, generator=rng(0))
    eps = torch.finfo(dtype).eps
    assert estimate.value.dtype == dtype
    assert abs(float(estimate) - 4.5) < 100 * eps
    assert float(estimate.stderr) < 100 * eps
    low, high = estimate.interval()
    assert low <= 4.5 <= high


def test_a_multiple_of_the_identity_has_no_variance() -> None:
    estimate = trace(as_operator(3 * torch.eye(200, dtype=D64)), method="xtrace", num_products=20, generator=rng(0))
    assert float(estimate) == pytest.approx(600, rel=1e-13)
    assert float(estimate.stderr) < 1e-11


def test_the_zero_matrix_has_trace_zero() -> None:
    estimate = trace(as_operator(torch.zeros(200, 200)), method="xtrace", generator=rng(0))
    assert (float(estimate), float(estimate.stderr), estimate.converged) == (0, 0, True)


def test_it_meets_rtol_with_fewer_products_than_plain_probes() -> None:
    A = as_operator(rotated(torch.arange(1, 301, dtype=D64) ** -2.0))
    cheap = trace(A, method="xtrace", rtol=0.005, generator=rng(0))
    plain = trace(A, method="hutchinson", rtol=0.005, max_products=10**5, generator=rng(0))
    assert cheap.converged
    assert cheap.stderr <= 0.005 * cheap.value
    assert cheap.num_products * 20 < plain.num_products


def test_n_products_are_made_where_they_suffice() -> None:
    small = trace(as_operator(-torch.diag(torch.tensor([1.0, 2.0, 3.0]))), method="xtrace")
    assert (float(small), float(small.stderr), small.method, small.num_products) == (-6, 0, "exact", 3)
    hard = trace(as_operator(rotated(indefinite(100))), method="xtrace", rtol=1e-6, generator=rng(0))
    assert (hard.method, hard.num_products) == ("exact", 200)
    bounded = trace(as_operator(rotated(indefinite(100))), method="xtrace", rtol=1e-6, max_products=199, generator=rng(0))
    assert (bounded.method, bounded.num_products, bounded.converged) == ("xtrace", 100, False)


def test_it_estimates_no_blocks() -> None:
    from flatminima.estimators import block_traces, diagonal

    for estimator in (block_traces, diagonal):
        with pytest.raises(ValueError, match="`method` must be one of auto, exact, hutch"):
            estimator(as_operator(torch.eye(3)), method="xtrace")
