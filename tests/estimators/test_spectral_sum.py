from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flatminima.estimators import Estimate, spectral_density, spectral_sum
from flatminima.operators import as_operator
from tests.estimators.spectra import decaying, diag, indefinite, rng, rotated
from tests.estimators.test_coverage import DOMINATED, coverage

FUNCTIONS = {"exp": torch.exp, "square": torch.square, "sigmoid": torch.sigmoid, "abs": torch.abs}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("f", FUNCTIONS)
def test_small_matrices_are_summed_exactly(f: str, dtype: torch.dtype) -> None:
    values = indefinite(50)
    estimate = spectral_sum(as_operator(rotated(values).to(dtype)), FUNCTIONS[f])
    assert float(estimate) == pytest.approx(float(FUNCTIONS[f](values).sum()), rel=1e-5 if dtype == torch.float32 else 1e-11)
    assert (float(estimate.stderr), estimate.num_products, estimate.method) == (0, 50, "exact")
    assert estimate.details["quadrature_error"] == 0
    assert estimate.value.dtype == dtype


@pytest.mark.parametrize("f", FUNCTIONS)
def test_probes_agree_with_the_dense_spectrum_beyond_the_quadrature_error(f: str) -> None:
    values = indefinite(400)
    estimate = spectral_sum(as_operator(rotated(values)), FUNCTIONS[f], rtol=0.02, method="slq", generator=rng(0))
    assert estimate.converged
    assert abs(float(estimate) - float(FUNCTIONS[f](values).sum())) < 4 * float(estimate.stderr)
    assert estimate.details["quadrature_error"] < 0.2 * float(estimate.stderr)


@settings(max_examples=20, deadline=None)
@given(st.integers(5, 60), st.integers(4, 12), st.integers(0, 10**6), st.sampled_from([torch.exp, torch.sigmoid]))
def test_the_quadrature_error_is_no_less_than_the_true_one(n: int, num_steps: int, seed: int, f: object) -> None:
    # the same probes with enough steps have no quadrature error
    A = as_operator(rotated(3 * torch.randn(n, generator=rng(seed), dtype=torch.float64), seed))
    few, many = (
        spectral_sum(A, f, num_probes=4, num_steps=m, method="slq", generator=rng(seed)) for m in (num_steps, 60)
    )  # fmt: skip
    error = abs(float(few) - float(many))
    assert error <= 10 * few.details["quadrature_error"] + 1e-9 * abs(float(many))


@settings(max_examples=20, deadline=None)
@given(st.floats(-3, 3), st.floats(-3, 3), st.integers(0, 10**6))
def test_the_sum_is_linear_in_the_function(a: float, b: float, seed: int) -> None:
    A = as_operator(rotated(indefinite(30), seed))
    kwargs = {"num_probes": 3, "num_steps": 6, "method": "slq"}
    both = spectral_sum(A, lambda x: a * x.exp() + b * x, generator=rng(seed), **kwargs)
    first = spectral_sum(A, torch.exp, generator=rng(seed), **kwargs)
    second = spectral_sum(A, lambda x: x, generator=rng(seed), **kwargs)
    assert float(both) == pytest.approx(a * float(first) + b * float(second), abs=1e-9)


def test_the_sum_is_the_density_s_mean_times_the_rows() -> None:
    A = as_operator(rotated(indefinite()))
    arguments = {"num_probes": 5, "num_steps": 8, "method": "slq"}
    density = spectral_density(A, generator=rng(3), **arguments)
    total = spectral_sum(A, torch.exp, generator=rng(3), **arguments)
    assert float(total) == pytest.approx(60 * float(density.mean(torch.exp)), rel=1e-12)
    assert float(total.stderr) == pytest.approx(60 * float(density.mean(torch.exp).stderr), rel=1e-12)


def test_simple_matrices_by_hand() -> None:
    assert float(spectral_sum(diag(3), torch.square, method="slq", num_probes=2)) == pytest.approx(9)
    assert float(spectral_sum(as_operator(torch.zeros(5, 5)), torch.exp, method="slq", num_probes=2)) == pytest.approx(5)
    repeated = as_operator(rotated([2.0, 2, 2, 5, 5, 5]))
    assert float(spectral_sum(repeated, torch.log, method="exact")) == pytest.approx(float(torch.tensor(1000.0).log()))


slow = pytest.mark.slow
STOPS = [
    {"num_probes": 20, "num_steps": 4},
    pytest.param({"num_probes": 40, "num_steps": 4}, marks=slow),
    pytest.param({"rtol": 0.03}, marks=slow),
]


@pytest.mark.parametrize("probes", ["rademacher", pytest.param("gaussian", marks=slow)])
@pytest.mark.parametrize("spectrum", ["decaying", pytest.param("indefinite", marks=slow)])
@pytest.mark.parametrize("stop", STOPS)
def test_the_sum_covers_the_truth_at_its_stated_level(spectrum: str, probes: str, stop: dict[str, float]) -> None:
    values = {"indefinite": indefinite(), "decaying": decaying()}[spectrum]
    A = as_operator(rotated(values))

    def run(generator: torch.Generator) -> Estimate:
        return spectral_sum(A, torch.exp, method="slq", probes=probes, deflate=0, generator=generator, **stop)

    level, _ = coverage(run, values.exp().sum())
    assert 0.93 <= level <= 0.97


@pytest.mark.parametrize("num_probes", [10, pytest.param(30, marks=slow)])
@pytest.mark.parametrize("spectrum", ["one", pytest.param("opposite", marks=slow)])
def test_the_sum_covers_the_truth_where_few_eigenvalues_dominate(spectrum: str, num_probes: int) -> None:
    values = DOMINATED[spectrum].double()
    A = as_operator(rotated(values))
    level, _ = coverage(
        lambda g: spectral_sum(A, lambda x: x, num_probes=num_probes, num_steps=2, method="slq", generator=g), values.sum()
    )
    assert 0.93 <= level <= 0.97


@pytest.mark.parametrize("probes", ["rademacher", pytest.param("gaussian", marks=slow)])
def test_the_sum_covers_the_truth_after_deflation(probes: str) -> None:
    values = torch.cat([torch.tensor([200.0]), torch.linspace(0.5, 1.5, 99)]).double()
    A = as_operator(rotated(values))

    def run(generator: torch.Generator) -> Estimate:
        return spectral_sum(
            A, torch.square, num_probes=10, num_steps=2, deflate=1, method="slq", probes=probes, generator=generator
        )

    level, _ = coverage(run, (values**2).sum())
    assert 0.93 <= level <= 0.97


def test_functions_that_do_not_fit_are_named(tmp_path: Path) -> None:
    A = diag(1, -2, 3)
    with pytest.raises(ValueError, match=r"`f` must be finite on the spectrum. Got f\(-2\) = nan"):
        spectral_sum(A, torch.log)
    with pytest.raises(ValueError, match="`f` must give one value for each eigenvalue"):
        spectral_sum(A, lambda x: x.sum())
    with pytest.raises(TypeError, match="`f` must be a function"):
        spectral_sum(A, "log")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`A` must be a LinearOperator"):
        spectral_sum(torch.eye(3), torch.exp)  # type: ignore[arg-type]

    def stop(done: int, total: int | None, message: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spectral_sum(A, torch.exp, progress=stop, resume=tmp_path / "state")
    with pytest.raises(ValueError, match="of another run: function is"):
        spectral_sum(A, torch.square, resume=tmp_path / "state")


def test_the_square_root_of_a_singular_matrix_is_not_spoilt_by_rounding() -> None:
    values: Tensor = torch.cat([torch.zeros(30), torch.linspace(1, 4, 10)]).double()
    for method in ("exact", "slq"):
        estimate = spectral_sum(as_operator(rotated(values).float()), torch.sqrt, num_probes=50, method=method, generator=rng(0))
        assert float(estimate) == pytest.approx(float(values.sqrt().sum()), abs=4 * float(estimate.stderr) + 1e-2)
