from __future__ import annotations

import math

import pytest
import torch

from flatminima.estimators import volume_proxy
from flatminima.operators import as_operator
from tests.estimators.spectra import decaying, diag, rng, rotated


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 5, 12])
def test_the_sum_of_logarithms_is_that_of_the_dense_spectrum_within_its_bound(k: int, dtype: torch.dtype) -> None:
    M = rotated(decaying(200)).to(dtype)
    truth = float(decaying(200)[:k].log().sum())
    estimate = volume_proxy(as_operator(M), k, generator=rng(0))
    assert estimate.converged
    assert estimate.value.dtype == dtype
    assert abs(float(estimate) - truth) <= estimate.details["error_bound"] + 100 * k * torch.finfo(dtype).eps
    assert estimate.details["error_bound"] < 1e-2
    assert float(estimate.stderr) == 0


def test_a_loose_residual_widens_the_bound_and_the_bound_holds() -> None:
    A = as_operator(rotated(decaying(300)))
    truth = float(decaying(300)[:10].log().sum())
    bounds = []
    for rtol in (1e-2, 1e-4):
        estimate = volume_proxy(A, 10, rtol=rtol, generator=rng(1))
        assert abs(float(estimate) - truth) <= estimate.details["error_bound"]
        bounds.append(estimate.details["error_bound"])
    assert bounds[1] < 0.1 * bounds[0]


def test_scaling_the_matrix_adds_k_logarithms() -> None:
    M = rotated(decaying(80))
    first, second = (volume_proxy(as_operator(c * M), 6, generator=rng(0)) for c in (1.0, 7.0))
    assert float(second) - float(first) == pytest.approx(6 * math.log(7), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k_above_the_effective_rank_is_refused_with_the_reason(dtype: torch.dtype) -> None:
    B = torch.randn(40, 5, generator=rng(0), dtype=torch.float64)
    A = as_operator((B @ B.T).to(dtype))
    assert volume_proxy(A, 5, generator=rng(0)).details["rank"] == "at least 5"
    with pytest.raises(ValueError, match=r"effective rank 5: eigenvalue 6 is .* not above the cut-off.*Got 6.*Take k=5 or less"):
        volume_proxy(A, 6, generator=rng(0))


def test_the_cut_off_is_relative_to_the_largest_eigenvalue() -> None:
    A = diag(100, 1, 1e-3)
    assert float(volume_proxy(A, 3)) == pytest.approx(math.log(0.1), abs=1e-6)
    assert volume_proxy(A, 3).details["rank"] == 3
    with pytest.raises(ValueError, match=r"effective rank 2: eigenvalue 3 is 0\.001, not above the cut-off 0\.01"):
        volume_proxy(A, 3, cutoff=1e-4)


def test_negative_and_zero_matrices_have_no_volume() -> None:
    for A in (diag(-1, -2), as_operator(torch.zeros(3, 3))):
        with pytest.raises(ValueError, match="the effective rank, which is 0: the largest eigenvalue is"):
            volume_proxy(A, 1)


def test_one_row_and_repeated_eigenvalues() -> None:
    assert float(volume_proxy(diag(3), 1)) == pytest.approx(math.log(3))
    assert float(volume_proxy(as_operator(rotated([2.0, 2, 2, 5, 5, 5])), 4)) == pytest.approx(math.log(250), abs=1e-6)


def test_bad_arguments_are_named() -> None:
    A = diag(1, 2, 3)
    with pytest.raises(ValueError, match="`k` must be at least 1"):
        volume_proxy(A, 0)
    with pytest.raises(ValueError, match="`k` must be at most 3"):
        volume_proxy(A, 4)
    with pytest.raises(ValueError, match="`cutoff` must be a finite number above 0"):
        volume_proxy(A, 1, cutoff=0.0)
    with pytest.raises(TypeError, match="`A` must be a LinearOperator"):
        volume_proxy(torch.eye(2), 1)  # type: ignore[arg-type]
