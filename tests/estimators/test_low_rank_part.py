from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812

from flatminima.estimators import Estimate, block_traces, diagonal, frobenius_norm, low_rank_part, trace
from flatminima.estimators.low_rank_part import LowRankPart
from flatminima.objective import Objective
from flatminima.operators import Hessian, as_operator
from tests.estimators.spectra import indefinite, rng, rotated

D64 = torch.float64
SPIKED = rotated([90.0, 70, -50, 30, 20, 10, 8, 6, 4, 3, 2, 1, *torch.linspace(-0.2, 0.3, 188).tolist()])
BLOCKS = {"a": slice(0, 30), "b": slice(30, 200)}


def joint(A: object, **options: object) -> Estimate:
    parts = list(block_traces(A, **options).values())
    return Estimate(torch.stack([e.value for e in parts]), torch.stack([e.stderr for e in parts]), method=parts[0].method)


ESTIMATORS = {
    "trace": (trace, lambda M: M.trace()),
    "block traces": (joint, lambda M: torch.stack([M.diagonal()[rows].sum() for rows in BLOCKS.values()])),
    "diagonal": (diagonal, lambda M: M.diagonal()),
    "norm": (frobenius_norm, lambda M: torch.linalg.matrix_norm(M)),
}


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 7), st.integers(8, 20))
def test_the_split_adds_up_to_the_matrix(seed: int, rank: int, n: int) -> None:
    M = rotated(torch.randn(n, generator=rng(seed), dtype=D64), seed)
    A = as_operator(M)
    part = LowRankPart.nothing(A).extended(A, torch.randn(n, rank, generator=rng(seed), dtype=D64))
    Q, Z, E = part.Q, part.Z, torch.eye(n, dtype=D64)
    R = part.rest_product(A, E)
    assert torch.allclose(R, part.rest(E, M), atol=1e-12)
    assert torch.allclose(Q @ Z.T + Z @ Q.T - Q @ (Q.T @ Z) @ Q.T + R, M, atol=1e-12)
    assert torch.allclose(Q.T @ Q, torch.eye(rank, dtype=D64), atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, D64])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_matrix_of_low_rank_is_exact_up_to_rounding_and_says_so(name: str, dtype: torch.dtype) -> None:
    M = rotated([3.0, 2.0, -1.0, 0.5, *[0.0] * 196])
    estimator, truth = ESTIMATORS[name]
    estimate = estimator(as_operator(M.to(dtype), blocks=BLOCKS), method="hutch++", num_products=24, generator=rng(0))
    eps, exact = torch.finfo(dtype).eps, truth(M)
    assert estimate.value.dtype == estimate.stderr.dtype == dtype
    assert torch.allclose(estimate.value.double(), exact, rtol=0, atol=200 * eps)
    assert (estimate.stderr < 200 * eps).all()
    assert ((estimate.value.double() - exact).abs() <= 8 * estimate.stderr.double() + 8 * eps * exact.abs()).all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_it_is_unbiased_and_its_standard_error_is_its_spread(name: str) -> None:
    estimator, truth = ESTIMATORS[name]
    A = as_operator(SPIKED, blocks=BLOCKS)
    runs = [estimator(A, method="hutch++", num_products=30, generator=rng(seed)) for seed in range(400)]
    values, stderr = torch.stack([e.value for e in runs]), torch.stack([e.stderr for e in runs])
    power = 2 if name == "norm" else 1  # of the norm it is the square that is unbiased
    off = (values**power).mean(0) - truth(SPIKED) ** power
    spread = (values**power).std(0)
    assert (off.abs() < 4.5 * spread / 400**0.5).all()
    ratio = stderr.square().mean(0).sqrt() / values.std(0)
    assert 0.9 < float(ratio.mean()) < 1.1


@pytest.mark.parametrize("name", ESTIMATORS)
def test_auto_takes_a_low_rank_part_where_few_eigenvalues_dominate(name: str) -> None:
    estimator, truth = ESTIMATORS[name]
    A = as_operator(SPIKED, blocks=BLOCKS)
    options = {"rtol": 0.02, "max_products": 10_000, "generator": rng(1)}
    plain = estimator(A, method="hutchinson", **options)
    cheap = estimator(A, **options)
    assert cheap.method == "hutch++"
    error = torch.linalg.vector_norm(cheap.value - truth(SPIKED)) / torch.linalg.vector_norm(truth(SPIKED))
    assert error < 0.06
    if name != "block traces":
        assert cheap.num_products * 4 < plain.num_products
        assert cheap.details["rank"] >= 8


def test_num_products_are_made_exactly() -> None:
    A = as_operator(SPIKED)
    for count in (4, 5, 29, 30, 31, 100):
        estimate = trace(A, method="hutch++", num_products=count, generator=rng(0))
        assert estimate.num_products == count
        assert estimate.details["rank"] == count // 3
        assert estimate.num_samples == count - 2 * (count // 3)
    assert trace(A, num_products=100, generator=rng(0)).num_products == 100
    assert trace(A, num_products=100, generator=rng(0)).method == "hutch++"


def test_flat_spectra_stay_with_plain_probes() -> None:
    for M in (rotated(torch.linspace(0.5, 1.5, 300, dtype=D64)), torch.diag(torch.rand(300, generator=rng(0), dtype=D64))):
        for estimator in (trace, frobenius_norm):
            estimate = estimator(as_operator(M), generator=rng(0))
            assert (estimate.method, estimate.num_products) == ("hutchinson", 20 if estimator is trace else 72)


def test_a_diagonal_matrix_stays_exact_under_auto() -> None:
    d = torch.randint(-9, 9, (300,), generator=rng(0)).double()
    estimate = trace(as_operator(torch.diag(d)), generator=rng(0))
    assert (float(estimate), float(estimate.stderr)) == (float(d.sum()), 0)


def test_memory_bounds_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    A = as_operator(SPIKED)
    monkeypatch.setattr(low_rank_part, "MAX_BYTES", 2 * 10 * 200 * 8)
    estimate = trace(A, method="hutch++", rtol=1e-4, max_products=150, generator=rng(0))
    assert estimate.details["rank"] == 10 or estimate.details["rank"] == 8
    monkeypatch.setattr(low_rank_part, "MAX_BYTES", 2 * 7 * 200 * 8)
    assert trace(A, rtol=0.05, max_products=150, generator=rng(0)).method == "hutchinson"
    monkeypatch.setattr(low_rank_part, "MAX_BYTES", 0)
    for method in ("hutch++", "xtrace"):
        with pytest.raises(
            ValueError, match=rf"`method` must not be '{method.replace('+', '.')}' here .*Use method='hutchinson'"
        ):
            trace(A, method=method)


def test_half_precision_is_sampled_plainly_and_averaged_in_float64() -> None:
    M = (SPIKED / 100).to(torch.bfloat16)
    A = as_operator((M + M.T) / 2)
    estimate = trace(A, num_products=200, generator=rng(0))
    assert estimate.method in ("hutchinson", "exact")
    assert estimate.value.dtype == torch.bfloat16
    ones = as_operator(torch.eye(300, dtype=torch.bfloat16))
    assert float(trace(ones, method="hutchinson", num_products=10)) == 300  # sums of ones in bfloat16 end at 256


def test_a_deadline_ends_the_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**6))
    monkeypatch.setattr(low_rank_part.time, "monotonic", lambda: float(next(ticks)))
    estimate = trace(as_operator(SPIKED), rtol=1e-6, max_seconds=20, max_products=199, generator=rng(0))
    assert not estimate.converged
    assert estimate.num_products < 199


def tanh_network() -> Hessian:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3)).double()
        x, y = torch.randn(100, 6, dtype=D64), torch.randint(0, 3, (100,))
    return Hessian(Objective(model, F.cross_entropy, (x, y)))


def test_a_low_rank_part_of_a_hessian_beats_its_split_where_that_leaves_much() -> None:
    H = tanh_network()
    dense = H.to_dense()
    estimate = trace(H, rtol=0.01, generator=rng(0))
    assert float(estimate) == pytest.approx(float(dense.trace()), rel=0.04)
    assert estimate.num_gradients > 0  # of the closed form, also where it is not used
    norm = frobenius_norm(H, rtol=0.01, generator=rng(0))
    assert norm.method == "hutch++"
    assert float(norm) == pytest.approx(float(torch.linalg.matrix_norm(dense)), rel=0.04)


def test_results_repeat_with_a_generator() -> None:
    A = as_operator(SPIKED)
    for method in ("hutch++", "xtrace", "auto"):
        first, second = (trace(A, method=method, rtol=0.01, generator=rng(7)) for _ in range(2))
        assert torch.equal(first.value, second.value)
        assert torch.equal(first.stderr, second.stderr)


def test_indefinite_matrices_keep_their_sign() -> None:
    M = -rotated(indefinite(100)) - 5 * torch.eye(100, dtype=D64)
    for method in ("hutch++", "xtrace"):
        estimate = trace(as_operator(M), method=method, num_products=60, generator=rng(0))
        assert float(estimate) == pytest.approx(float(M.trace()), abs=4 * float(estimate.stderr))
