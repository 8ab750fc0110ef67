from __future__ import annotations

import math

import pytest
import torch

from flatminima._errors import NonFiniteLoss
from flatminima.estimators import block_traces, diagonal, eigenpairs, frobenius_norm, lanczos, sampling, trace
from flatminima.estimators.sampling import Plan, draw_probes
from flatminima.estimators.stopping import FIRST_LOOK
from flatminima.operators import as_operator
from tests.estimators.spectra import diag, indefinite, rng, rotated

A = as_operator(rotated(indefinite()))


@pytest.mark.parametrize("probes", ["rademacher", "gaussian"])
def test_probes_do_not_depend_on_how_many_are_drawn_at_once(probes: str) -> None:
    first, second = (Plan.checked(probes=probes, generator=rng(1)) for _ in range(2))
    together = draw_probes(A, 7, first)
    apart = torch.cat([draw_probes(A, 3, second), draw_probes(A, 4, second)], dim=1)
    assert torch.equal(together, apart)


def test_probes_are_isotropic() -> None:
    V = draw_probes(diag(*range(4)), 4000, Plan.checked(probes="gaussian", generator=rng(0)))
    assert torch.allclose(V @ V.T / 4000, torch.eye(4, dtype=torch.float64), atol=0.1)
    assert (draw_probes(A, 9, Plan.checked(generator=rng(0))).abs() == 1).all()


@pytest.mark.parametrize("num_products", [2, 3, 31, 100])
def test_exactly_num_products_are_made(num_products: int) -> None:
    estimate = trace(A, method="hutchinson", num_products=num_products, generator=rng(0))
    assert estimate.num_products == estimate.num_samples == num_products
    assert estimate.converged


def test_mean_and_standard_error_are_those_of_the_samples() -> None:
    estimate = trace(A, method="hutchinson", num_products=100, generator=rng(3))
    V = draw_probes(A, 100, Plan.checked(generator=rng(3)))
    samples = (V * (A @ V)).sum(0)
    assert float(estimate.value) == pytest.approx(float(samples.mean()), rel=1e-13)
    assert float(estimate.stderr) == pytest.approx(float(samples.std() / 10), rel=1e-13)


def test_standard_error_survives_a_large_common_offset() -> None:
    offset = as_operator(rotated(indefinite()) + 1e9 * torch.eye(60, dtype=torch.float64))
    near, far = (trace(B, method="hutchinson", num_products=50, generator=rng(0)).stderr for B in (A, offset))
    assert float(far) == pytest.approx(float(near), rel=1e-5)


def test_rtol_is_met_and_never_before_the_least_number_of_samples() -> None:
    estimate = trace(A, method="hutchinson", rtol=0.03, generator=rng(0))
    assert estimate.converged
    assert estimate.stderr <= 0.03 * estimate.value.abs()
    assert trace(A, method="hutchinson", rtol=10.0, generator=rng(0)).num_samples == FIRST_LOOK


def test_max_products_ends_the_sampling_unconverged() -> None:
    estimate = trace(A, method="hutchinson", rtol=1e-6, max_products=77, generator=rng(0))
    assert estimate.num_products == 77
    assert not estimate.converged


def test_max_seconds_ends_the_sampling_unconverged(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setattr(sampling.time, "monotonic", lambda: float(next(ticks)))
    estimate = trace(A, method="hutchinson", num_products=1000, max_seconds=8, generator=rng(0))
    assert 2 <= estimate.num_samples < 1000
    assert not estimate.converged
    assert math.isfinite(estimate.stderr)


def test_results_repeat_with_a_generator_and_leave_the_global_one_alone() -> None:
    before = torch.get_rng_state()
    first, second = (trace(A, method="hutchinson", num_products=9, generator=rng(5)) for _ in range(2))
    assert torch.equal(first.value, second.value)
    assert torch.equal(first.stderr, second.stderr)
    pairs = [eigenpairs(A, 3, generator=rng(5)) for _ in range(2)]
    assert torch.equal(pairs[0].vectors, pairs[1].vectors)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_generator_the_global_one_is_used() -> None:
    torch.manual_seed(3)
    first = trace(A, method="hutchinson", num_products=9).value
    torch.manual_seed(3)
    assert torch.equal(trace(A, method="hutchinson", num_products=9).value, first)


def test_progress_counts_products_and_may_stop_the_work() -> None:
    calls: list[tuple[int, int | None]] = []
    trace(A, method="hutchinson", num_products=70, generator=rng(0), progress=lambda d, t, m: calls.append((d, t)))
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1] == (70, 70)

    def interrupt(done: int, total: int | None, message: str) -> None:
        raise KeyboardInterrupt

    for estimator in (trace, block_traces, diagonal, frobenius_norm, eigenpairs):
        with pytest.raises(KeyboardInterrupt):
            estimator(A, progress=interrupt)


@pytest.mark.parametrize("estimator", [trace, block_traces, diagonal, frobenius_norm])
def test_bad_arguments_are_named(estimator) -> None:
    with pytest.raises(ValueError, match=r"`num_products` must be at least 2 \(a standard error takes two samples\). Got 1"):
        estimator(A, num_products=1)
    with pytest.raises(ValueError, match="`num_products` and `rtol` must not both be given"):
        estimator(A, num_products=5, rtol=0.1)
    with pytest.raises(ValueError, match="`rtol` must be a finite number above 0"):
        estimator(A, rtol=0.0)
    with pytest.raises(ValueError, match="`max_seconds` must be"):
        estimator(A, max_seconds=-1)
    with pytest.raises(ValueError, match="`max_products` must be at least 2"):
        estimator(A, max_products=1)
    with pytest.raises(ValueError, match=r"`method` must be one of .*Did you mean 'hutchinson'"):
        estimator(A, method="hutchison")
    with pytest.raises(TypeError, match=r"`A` must be a LinearOperator. Got Tensor. Write as_operator"):
        estimator(torch.eye(2))
    with pytest.raises(TypeError, match=r"`generator` must be a torch.Generator"):
        estimator(A, generator=3)


@pytest.mark.parametrize("estimator", [trace, frobenius_norm])
def test_unknown_probes_are_named(estimator) -> None:
    with pytest.raises(ValueError, match=r"`probes` must be one of rademacher, gaussian.*Did you mean 'rademacher'"):
        estimator(A, probes="rademacer")


@pytest.mark.filterwarnings("ignore:A product of Dense is infinite:RuntimeWarning")
def test_a_product_that_overflows_is_an_error() -> None:
    nan = as_operator(torch.full((80, 80), torch.nan))
    for estimator in (trace, block_traces, diagonal, frobenius_norm, eigenpairs):
        with pytest.raises(NonFiniteLoss, match="must be finite"):
            estimator(nan)
    with pytest.raises(NonFiniteLoss, match="must be finite"):
        lanczos(nan, torch.ones(80), 3)
