"""Closed form, then control variate, then probes; with stand-ins for the closed forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flatminima.estimators import Estimate, block_traces, closed_form, diagonal, trace
from flatminima.estimators.closed_form import ControlVariate
from flatminima.operators import LinearOperator, as_operator
from tests.estimators.spectra import indefinite, rng, rotated

N = 90
BLOCKS = {"1.weight": slice(0, 20), "1.bias": slice(20, 30), "2.weight": slice(30, 70), "3.weight": slice(70, 90)}
LAYERS = (("1.weight", "1.bias"), ("2.weight",), ("3.weight",))
ROWS = (slice(0, 30), slice(30, 70), slice(70, 90))
K = rotated(indefinite(N) + 1, 1)
METHOD = "exact Gauss-Newton part + hutchinson residual"


def split(monkeypatch: pytest.MonkeyPatch, R: Tensor, dtype: torch.dtype = torch.float64) -> LinearOperator:
    """Return A = K + R whose closed forms know the diagonal of K."""
    known = as_operator(K.to(dtype), blocks=BLOCKS)
    A = as_operator((K + R).to(dtype), blocks=BLOCKS)

    def known_diagonal(X: LinearOperator) -> Estimate | None:
        return Estimate.exact(K.diagonal().to(dtype), method="exact", num_gradients=4) if X is known else None

    monkeypatch.setattr(closed_form, "known_diagonal", known_diagonal)
    monkeypatch.setattr(closed_form, "known_block_traces", lambda X: None)
    monkeypatch.setattr(closed_form, "control_variate", lambda X: ControlVariate(known, LAYERS) if X is A else None)
    return A


def off_diagonal(scale: float = 1.0) -> Tensor:
    """Return a matrix without diagonal blocks per layer."""
    R = scale * rotated(torch.linspace(-1, 1, N, dtype=torch.float64), 2)
    for rows in ROWS:
        R[rows, rows] = 0
    return R


def test_a_closed_form_answers_without_products(monkeypatch: pytest.MonkeyPatch) -> None:
    A = as_operator(K, blocks=BLOCKS)
    value = {name: Estimate.exact(K.diagonal()[rows].sum(), method="closed") for name, rows in BLOCKS.items()}
    monkeypatch.setattr(closed_form, "known_block_traces", lambda X: value)
    monkeypatch.setattr(closed_form, "known_diagonal", lambda X: Estimate.exact(K.diagonal(), method="closed"))
    for method in ("auto", "exact"):
        estimate = trace(A, method=method)
        assert (estimate.num_products, estimate.method, float(estimate.stderr)) == (0, "closed", 0)
        assert float(estimate) == pytest.approx(float(K.trace()), rel=1e-14)
        assert torch.equal(diagonal(A, method=method).value, K.diagonal())
        assert {n: float(e) for n, e in block_traces(A, method=method).items()} == {n: float(e) for n, e in value.items()}
    assert trace(A, method="hutchinson", num_products=5, generator=rng(0)).method == "hutchinson"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_residual_without_diagonal_blocks_is_settled_by_two_probes_a_layer(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    A = split(monkeypatch, off_diagonal(), dtype)
    eps = torch.finfo(dtype).eps
    for estimate, truth in (
        (trace(A, generator=rng(0)), K.trace()),
        (diagonal(A, generator=rng(0)), K.diagonal()),
        (block_traces(A, generator=rng(0))["1.weight"], K.diagonal()[:20].sum()),
    ):
        assert estimate.method == METHOD
        assert estimate.converged
        assert (estimate.num_products, estimate.num_gradients, estimate.num_samples) == (12, 4, 2)
        assert torch.allclose(estimate.value.double(), truth, atol=200 * eps)
        assert (estimate.stderr <= 200 * eps).all()


def test_only_layers_with_a_residual_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    R = off_diagonal()
    R[30:70, 30:70] = rotated(torch.linspace(-0.2, 0.3, 40, dtype=torch.float64), 3)
    A = split(monkeypatch, R)
    estimate = trace(A, rtol=0.01, generator=rng(0))
    assert estimate.method == METHOD
    assert estimate.converged
    assert 0 < float(estimate.stderr) <= 0.01 * float(estimate)
    low, high = estimate.interval(0.999)
    assert low <= (K + R).trace() <= high
    value = diagonal(A, rtol=0.05, generator=rng(0)).value
    assert torch.allclose(value[:30], K.diagonal()[:30], atol=1e-12)  # a settled layer has no noise from the others


def test_plain_probes_are_taken_where_the_split_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    # A has little variance, K and R = A − K have much: two products a probe would buy nothing
    A = split(monkeypatch, torch.eye(N, dtype=torch.float64) - K + off_diagonal(0.01))
    estimate = trace(A, rtol=0.005, generator=rng(0))
    assert estimate.method == "hutchinson"
    assert float(estimate) == pytest.approx(N, abs=4 * float(estimate.stderr))


@pytest.mark.parametrize("stop", [{"num_products": 80}, {"rtol": 0.03}])
def test_the_split_covers_the_truth_at_its_stated_level(monkeypatch: pytest.MonkeyPatch, stop: dict[str, float]) -> None:
    R = off_diagonal(1.5)
    for j, rows in enumerate(ROWS[1:]):
        size = rows.stop - rows.start
        R[rows, rows] = rotated(torch.linspace(-2, 2.5, size, dtype=torch.float64), j)
    A = split(monkeypatch, R)
    truth, hits, sampled = (K + R).trace(), 0, 0
    for seed in range(1000):
        estimate = trace(A, generator=rng(seed), **stop)
        if estimate.num_samples is None:  # the pilot foresaw more than n products
            assert float(estimate) == pytest.approx(float(truth), rel=1e-12)
            continue
        low, high = estimate.interval(0.95)
        hits += bool(low <= truth <= high)
        sampled += 1
    assert sampled > 500
    assert 0.925 <= hits / sampled <= 0.975


@pytest.mark.parametrize("num_products", [2, 11, 12, 13, 30, 43, 44, 60])
def test_num_products_bounds_the_cost_of_every_route(monkeypatch: pytest.MonkeyPatch, num_products: int) -> None:
    R = rotated(torch.linspace(-1, 1, N, dtype=torch.float64), 2)
    estimate = trace(split(monkeypatch, R), num_products=num_products, generator=rng(0))
    assert 2 <= estimate.num_products <= num_products
    assert estimate.converged
    assert float((estimate.value - (K + R).trace()).abs() / estimate.stderr) < 60


def test_standard_error_of_a_layer_by_layer_estimate_is_its_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    R = off_diagonal(10.0)
    for rows in ROWS:
        R[rows, rows] = rotated(torch.linspace(-0.5, 0.6, rows.stop - rows.start, dtype=torch.float64), 5)
    A = split(monkeypatch, R)
    runs = [trace(A, num_products=80, generator=rng(seed)) for seed in range(200)]
    assert {e.method for e in runs} == {METHOD}
    spread = torch.stack([e.value for e in runs]).std()
    claimed = torch.stack([e.stderr for e in runs]).square().mean().sqrt()
    assert float(claimed) == pytest.approx(float(spread), rel=0.15)
