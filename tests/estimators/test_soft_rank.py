from __future__ import annotations

import pytest
import torch

from flatminima.estimators import soft_rank
from flatminima.operators import as_operator
from tests.estimators.spectra import decaying, diag, rng, rotated
from tests.estimators.test_coverage import coverage


def test_each_eigenvalue_counts_by_its_share_of_itself_and_the_damping() -> None:
    assert float(soft_rank(diag(1, 3, 0), damping=1.0)) == pytest.approx(0.5 + 0.75)
    assert float(soft_rank(diag(1e6, 2e6, 0, 0), damping=1e-3)) == pytest.approx(2, abs=1e-6)
    assert float(soft_rank(as_operator(torch.zeros(3, 3)), damping=0.1)) == 0
    assert float(soft_rank(diag(4), damping=4)) == pytest.approx(0.5)


def test_a_small_damping_gives_the_rank_and_a_large_one_the_trace_over_it() -> None:
    B = torch.randn(40, 5, generator=rng(0))
    A = as_operator(B @ B.T)
    assert float(soft_rank(A, damping=1e-5)) == pytest.approx(5, abs=1e-4)
    assert float(soft_rank(A, damping=1e6)) == pytest.approx(float((B**2).sum()) / 1e6, rel=1e-3)


def test_probes_agree_with_the_dense_spectrum() -> None:
    values = decaying(500)
    estimate = soft_rank(as_operator(rotated(values).float()), damping=0.02, rtol=0.02, method="slq", generator=rng(0))
    assert estimate.converged
    assert estimate.value.dtype == torch.float32
    assert abs(float(estimate) - float((values / (values + 0.02)).sum())) < 4 * float(estimate.stderr)


def test_a_pole_in_the_spectrum_is_refused_and_a_small_negative_eigenvalue_is_reported() -> None:
    with pytest.raises(ValueError, match=r"`damping` must be above the magnitude of the smallest eigenvalue \(-5\)"):
        soft_rank(diag(3, -5, 1), damping=1.0)
    estimate = soft_rank(diag(3, -0.1, 1), damping=1.0)
    assert float(estimate) == pytest.approx(0.75 - 1 / 9 + 0.5)
    assert estimate.details["num_negative"] == 1
    with pytest.raises(ValueError, match="`damping` must be a finite number above 0"):
        soft_rank(diag(1), damping=0.0)


@pytest.mark.parametrize("num_probes", [10, pytest.param(30, marks=pytest.mark.slow)])
def test_the_soft_rank_covers_the_truth_at_its_stated_level(num_probes: int) -> None:
    values = decaying()
    A = as_operator(rotated(values))
    truth = (values / (values + 0.1)).sum()
    level, _ = coverage(lambda g: soft_rank(A, 0.1, num_probes=num_probes, num_steps=7, method="slq", generator=g), truth)
    assert 0.93 <= level <= 0.97
