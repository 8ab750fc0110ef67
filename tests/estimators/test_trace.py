from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatminima.estimators import block_traces, trace
from flatminima.operators import as_operator
from tests.estimators.spectra import diag, indefinite, rng, rotated

DTYPES = [torch.float32, torch.float64]
METHODS = ["auto", "exact", "hutchinson"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_diagonal_matrix_has_an_exact_trace_with_the_right_sign(dtype: torch.dtype, method: str) -> None:
    estimate = trace(-diag(1, 2, 3, dtype=dtype), method=method, generator=rng(0))
    assert float(estimate) == -6
    assert float(estimate.stderr) == 0
    assert estimate.value.dtype == estimate.stderr.dtype == dtype
    assert estimate.converged


@pytest.mark.parametrize("method", METHODS)
def test_cancelling_entries_give_exactly_zero(method: str) -> None:
    estimate = trace(diag(3, -3), method=method, generator=rng(0))
    assert (float(estimate), float(estimate.stderr), estimate.converged) == (0, 0, True)


@pytest.mark.parametrize("method", METHODS)
def test_zero_matrix_has_trace_zero(method: str) -> None:
    Z = as_operator(torch.zeros(5, 5))
    assert torch.equal(Z @ torch.ones(5), torch.zeros(5))
    assert float(trace(Z, method=method)) == 0
    assert float((0.0 * as_operator(torch.eye(3)) @ torch.ones(3)).abs().max()) == 0


def test_swap_matrix_has_samples_of_plus_and_minus_two() -> None:
    A = as_operator(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    # the mean of two samples ±2 is −2, 0 or 2
    means = {float(trace(A, method="hutchinson", num_products=2, generator=rng(seed))) for seed in range(40)}
    assert means == {-2.0, 0.0, 2.0}
    assert float(trace(A)) == 0


def test_exact_costs_n_products_and_agrees_with_the_dense_trace() -> None:
    M = rotated(indefinite(70))
    estimate = trace(as_operator(M), method="exact")
    assert float(estimate) == pytest.approx(float(M.trace()), abs=1e-12)
    assert (estimate.num_products, estimate.num_samples, estimate.method) == (70, None, "exact")


def test_auto_is_exact_where_sampling_would_cost_as_much() -> None:
    A = as_operator(rotated(indefinite(60)))
    assert trace(A).method == "exact"
    assert trace(A, num_products=60).method == "exact"
    assert trace(A, num_products=59, generator=rng(0)).method == "hutchinson"


def test_auto_leaves_the_probes_once_n_products_are_forecast_to_be_cheaper() -> None:
    A = as_operator(rotated(indefinite(200)))
    estimate = trace(A, rtol=1e-3, generator=rng(0))
    assert (estimate.method, estimate.num_products, float(estimate.stderr)) == ("exact", 208, 0)  # the first block tells
    assert float(estimate) == pytest.approx(float(indefinite(200).sum()), rel=1e-12)
    assert not trace(A, rtol=1e-3, max_products=207, generator=rng(0)).converged


@pytest.mark.parametrize("probes", ["rademacher", "gaussian"])
def test_standard_error_is_that_of_the_theory(probes: str) -> None:
    M = rotated(indefinite())
    variance = 2 * (M.square().sum() - (M.diagonal().square().sum() if probes == "rademacher" else 0))
    estimate = trace(as_operator(M), method="hutchinson", num_products=4000, probes=probes, generator=rng(0))
    assert float(estimate.stderr) == pytest.approx(float((variance / 4000).sqrt()), rel=0.05)


def test_block_traces_of_a_diagonal_are_exact_and_share_their_products() -> None:
    blocks = {"a": slice(0, 2), "b": slice(2, 4), "c": slice(4, 6)}
    A = diag(1, 2, 3, 4, 5, 6, blocks=blocks)
    for method in METHODS:
        traces = block_traces(A, method=method, num_products=4, generator=rng(0))
        assert {name: float(e) for name, e in traces.items()} == {"a": 3, "b": 7, "c": 11}
        assert all(float(e.stderr) == 0 for e in traces.values())
    assert sum(e.num_products for e in traces.values()) == 4


def test_block_traces_add_up_to_the_trace_of_the_same_probes() -> None:
    A = as_operator(rotated(indefinite()), blocks={"a": slice(0, 13), "b": slice(13, 60)})
    parts = block_traces(A, method="hutchinson", num_products=20, generator=rng(0))
    whole = trace(A, method="hutchinson", num_products=20, generator=rng(0))
    assert sum(float(e) for e in parts.values()) == pytest.approx(float(whole), rel=1e-12)


def test_blocks_that_met_the_tolerance_are_converged_when_others_are_not() -> None:
    M = torch.zeros(80, 80, dtype=torch.float64)
    M[:40, :40] = 5 * torch.eye(40, dtype=torch.float64)
    M[40:, 40:] = rotated(torch.linspace(-1, 1, 40, dtype=torch.float64))
    traces = block_traces(
        as_operator(M, blocks={"easy": slice(0, 40), "hard": slice(40, 80)}),
        method="hutchinson",
        max_products=70,
        generator=rng(0),
    )
    assert (traces["easy"].converged, traces["hard"].converged) == (True, False)


symmetric = st.integers(2, 12).flatmap(
    lambda n: st.integers(0, 2**31).map(lambda seed: rotated(torch.randn(n, generator=rng(seed), dtype=torch.float64), seed))
)


@settings(max_examples=30, deadline=None)
@given(symmetric, st.floats(-50, 50), st.sampled_from(["rademacher", "gaussian"]))
def test_trace_is_homogeneous(M: torch.Tensor, c: float, probes: str) -> None:
    A = as_operator(M)
    one, scaled = (trace(B, method="hutchinson", num_products=5, probes=probes, generator=rng(1)) for B in (A, c * A))
    assert float(scaled) == pytest.approx(c * float(one), rel=1e-10, abs=1e-10)
    assert float(scaled.stderr) == pytest.approx(abs(c) * float(one.stderr), rel=1e-8, abs=1e-10)


@settings(max_examples=30, deadline=None)
@given(symmetric, st.integers(0, 1000))
def test_trace_is_additive(M: torch.Tensor, seed: int) -> None:
    N = rotated(torch.linspace(-3, 1, M.shape[0], dtype=torch.float64), seed)
    A, B = as_operator(M), as_operator(N)
    of_A, of_B, of_sum = (trace(X, method="hutchinson", num_products=5, generator=rng(seed)) for X in (A, B, A + B))
    assert float(of_sum) == pytest.approx(float(of_A) + float(of_B), rel=1e-10, abs=1e-10)


@settings(max_examples=30, deadline=None)
@given(symmetric)
def test_exact_trace_is_the_dense_one(M: torch.Tensor) -> None:
    assert float(trace(as_operator(M), method="exact")) == pytest.approx(float(M.trace()), abs=1e-10)
