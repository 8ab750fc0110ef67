from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from flatminima.estimators import logdet
from flatminima.operators import as_operator
from tests.estimators.spectra import decaying, diag, indefinite, rng, rotated
from tests.estimators.test_coverage import coverage

DTYPES = [torch.float32, torch.float64]


def test_a_singular_matrix_gives_minus_infinity_unless_a_prior_or_a_cut_off_is_stated() -> None:
    # Hessian of ½(ab − 1)² at (1, 1)
    A = as_operator(torch.ones(2, 2, dtype=torch.float64))
    plain = logdet(A)
    assert float(plain) == -math.inf
    assert plain.interval() == (-math.inf, -math.inf)
    assert (plain.details["rank"], plain.details["num_negative"], plain.details["num_left_out"]) == (1, 0, 1)
    assert float(logdet(A, prior_precision=0.01)) == pytest.approx(-3.90704, abs=1e-5)
    assert float(logdet(A, cutoff=0.1)) == pytest.approx(math.log(2))
    assert float(logdet(A, cutoff=0.0)) == pytest.approx(math.log(2))


def test_a_negative_eigenvalue_is_reported_not_logged() -> None:
    # Hessian of ½(v relu(w) − 7)² at (1, 2)
    A = as_operator(torch.tensor([[4.0, -3.0], [-3.0, 1.0]], dtype=torch.float64))
    low, high = torch.linalg.eigvalsh(A.to_dense()).tolist()
    assert low == pytest.approx(-0.85410, abs=1e-5)
    with pytest.raises(ValueError, match=r"`A` must have no negative eigenvalue .* Got 1 negative, the smallest -0.854102"):
        logdet(A)
    for arguments, shift in (({"prior_precision": 0.01}, 0.01), ({"cutoff": 1e-6}, 0.0)):
        estimate = logdet(A, **arguments)
        assert float(estimate) == pytest.approx(math.log(high + shift))
        assert (estimate.details["num_negative"], estimate.details["num_left_out"], estimate.details["rank"]) == (1, 1, 2)
    assert float(logdet(A, prior_precision=1.0)) == pytest.approx(math.log((high + 1) * (low + 1)))
    assert logdet(A, prior_precision=1.0).details["num_left_out"] == 0


@pytest.mark.parametrize("method", ["auto", "slq"])
def test_rounding_of_a_rank_deficient_matrix_counts_as_zero(method: str) -> None:
    B = torch.randn(40, 5, generator=rng(1))
    A = as_operator(B @ B.T)
    assert torch.linalg.eigvalsh(A.to_dense())[0] < 0  # about −1e-6
    truth = torch.linalg.eigvalsh(B.double() @ B.double().T).clamp_min(0)
    estimate = logdet(A, prior_precision=1e-3, method=method, num_probes=200, num_steps=40, generator=rng(0))
    assert estimate.details["num_negative"] == 0
    assert estimate.details["rank"] == pytest.approx(5, abs=1.5 if method == "slq" else 0)
    assert estimate.details["noise_floor"] == pytest.approx(20 * torch.finfo(torch.float32).eps * float(truth[-1]), rel=1e-3)
    assert float(estimate) == pytest.approx(float((truth + 1e-3).log().sum()), abs=4 * float(estimate.stderr) + 1e-2)
    assert float(logdet(A)) == -math.inf
    assert float(logdet(A, cutoff=0.0)) == pytest.approx(float(truth[-5:].log().sum()), rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_simple_matrices_by_hand(dtype: torch.dtype) -> None:
    assert float(logdet(diag(1, 2, 3, dtype=dtype))) == pytest.approx(math.log(6), rel=1e-6)
    assert float(logdet(diag(5, dtype=dtype))) == pytest.approx(math.log(5), rel=1e-6)
    assert float(logdet(as_operator(torch.zeros(3, 3, dtype=dtype)))) == -math.inf
    assert float(logdet(as_operator(torch.zeros(3, 3, dtype=dtype)), prior_precision=0.5)) == pytest.approx(3 * math.log(0.5))
    assert float(logdet(as_operator(torch.zeros(3, 3, dtype=dtype)), cutoff=0.0)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("delta", [1e-3, 0.1])
def test_probes_agree_with_the_dense_spectrum_and_the_quadrature_error_is_small(delta: float, dtype: torch.dtype) -> None:
    values = decaying(400)
    A = as_operator(rotated(values).to(dtype))
    truth = float((values + delta).log().sum())
    estimate = logdet(A, prior_precision=delta, rtol=0.01, method="slq", generator=rng(2))
    assert estimate.converged
    assert abs(float(estimate) - truth) < 4 * float(estimate.stderr)
    assert estimate.details["quadrature_error"] < 0.2 * float(estimate.stderr)
    assert estimate.details["num_left_out"] == 0


def test_a_cut_off_inside_the_spectrum_is_counted_by_probes_too() -> None:
    values = torch.cat([torch.zeros(150), torch.linspace(1, 3, 50)]).double()
    estimate = logdet(as_operator(rotated(values)), cutoff=0.5, num_probes=100, num_steps=12, method="slq", generator=rng(0))
    assert float(estimate) == pytest.approx(float(values[150:].log().sum()), abs=4 * float(estimate.stderr))
    assert estimate.details["num_left_out"] == pytest.approx(150, abs=4 * estimate.details["rank_stderr"] + 1)


def test_too_few_steps_are_said() -> None:
    A = as_operator(rotated(torch.logspace(-8, 0, 300, dtype=torch.float64)))
    estimate = logdet(A, num_probes=50, num_steps=5, method="slq", generator=rng(0))
    assert not estimate.converged
    assert estimate.details["quadrature_error"] > float(estimate.stderr)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "stop",
    [
        {"num_probes": 10, "num_steps": 5},
        pytest.param({"num_probes": 10}, marks=slow),
        pytest.param({"num_probes": 30}, marks=slow),
        pytest.param({"rtol": 0.02}, marks=slow),
    ],
)
def test_the_log_determinant_covers_the_truth_at_its_stated_level(stop: dict[str, float]) -> None:
    values = decaying()
    A = as_operator(rotated(values))
    truth = (values + 0.5).log().sum()
    level, _ = coverage(lambda g: logdet(A, prior_precision=0.5, method="slq", deflate=0, generator=g, **stop), truth)
    assert 0.93 <= level <= 0.97


def test_an_interrupted_run_goes_on_to_the_same_answer(tmp_path: Path) -> None:
    A = as_operator(rotated(decaying(150)))
    arguments = {"prior_precision": 0.01, "num_probes": 20, "method": "slq"}
    whole = logdet(A, generator=rng(0), **arguments)

    def interrupt(done: int, total: int | None, message: str) -> None:
        if done > whole.num_products // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        logdet(A, generator=rng(0), progress=interrupt, resume=tmp_path / "state", **arguments)
    with pytest.raises(ValueError, match=r"prior_precision is 0\.01 there and 0\.02 here"):
        logdet(A, generator=rng(0), resume=tmp_path / "state", **arguments | {"prior_precision": 0.02})
    resumed = logdet(A, generator=rng(0), resume=tmp_path / "state", **arguments)
    assert float(resumed) == float(whole)
    assert float(resumed.stderr) == float(whole.stderr)


def test_bad_arguments_are_named() -> None:
    A = diag(1, 2)
    with pytest.raises(ValueError, match="`prior_precision` and `cutoff` must not both"):
        logdet(A, prior_precision=1.0, cutoff=1.0)
    with pytest.raises(ValueError, match="`prior_precision` must be a finite number above 0"):
        logdet(A, prior_precision=0.0)
    with pytest.raises(ValueError, match="`cutoff` must be a finite number of at least 0"):
        logdet(A, cutoff=-1.0)
    with pytest.raises(ValueError, match=r"about .* negative"):
        logdet(as_operator(rotated(indefinite(41))), num_probes=3, method="slq", generator=rng(0))
