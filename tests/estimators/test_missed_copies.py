from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatminima.estimators import eigenpairs, lanczos
from flatminima.estimators.missed_copies import MissedCopies, bound_beyond
from flatminima.operators import as_operator
from tests.estimators.spectra import rng, rotated


def follow(M: torch.Tensor, q: torch.Tensor, steps: int) -> MissedCopies:
    T = lanczos(as_operator(M), q, steps)
    check = MissedCopies(1)
    for alpha, beta in zip(T.alphas.tolist(), [*T.betas.tolist(), float(T.remainder)], strict=True):
        check.record(alpha, beta)
    return check


@settings(max_examples=60, deadline=None)
@given(st.integers(5, 40), st.integers(1, 8), st.integers(0, 10**6))
def test_the_weight_of_an_eigenvector_is_at_most_what_the_recursion_says(n: int, steps: int, seed: int) -> None:
    values = torch.randn(n, generator=rng(seed), dtype=torch.float64)
    M = rotated(values, seed)
    q = torch.nn.functional.normalize(torch.randn(n, generator=rng(seed + 1), dtype=torch.float64), dim=0)
    check = follow(M, q, min(steps, n - 1))
    d, U = torch.linalg.eigh(M)
    top, bottom = (float(d[-1]) - 1e-9, float(d[0]) + 1e-9)
    for weight, u in zip(check._log_weights((top, bottom)), (U[:, -1], U[:, 0]), strict=True):
        assert math.log(float((u @ q).abs())) <= weight + 1e-6


def test_an_eigenvalue_beyond_the_bound_is_hardly_ever_excluded() -> None:
    values = torch.rand(300, generator=rng(0), dtype=torch.float64)
    values[0] = 1.3
    M = torch.diag(values)
    wrong = right = 0
    for seed in range(300):
        check = MissedCopies(1)
        T = lanczos(as_operator(M), torch.randn(300, generator=rng(seed), dtype=torch.float64), 25)
        full = [*T.betas.tolist(), float(T.remainder)]
        for alpha, beta in zip(T.alphas.tolist(), full, strict=True):
            check.record(alpha, beta)
            wrong += check.has_excluded((1.29, None), 300)
        right += check.has_excluded((1.31, None), 300)
    assert wrong <= 9  # at most 1 % of the runs, and three standard errors
    assert right == 300


def test_evidence_survives_a_cut() -> None:
    check = follow(torch.diag(torch.rand(200, generator=rng(0), dtype=torch.float64)), torch.ones(200), 6)
    bounds = (1.5, -0.5)
    before = check._log_weights(bounds)
    check.cut(bounds)
    assert check._log_weights(bounds) == before
    check.record(0.5, 0.25)
    assert all(after < earlier for after, earlier in zip(check._log_weights(bounds), before, strict=True))


def test_only_what_was_found_as_often_as_there_were_starts_can_have_a_copy() -> None:
    found = torch.tensor([5.0, 3.0, 3.0, 1.0], dtype=torch.float64)
    assert bound_beyond(found, 0.1, None) == pytest.approx(1.1)
    assert bound_beyond(found, 0.1, 1) == pytest.approx(2.95)
    assert bound_beyond(found, 0.1, 2) == pytest.approx(2.95)
    assert bound_beyond(found, 0.1, 3) is None
    assert bound_beyond(found[3:], 0.1, 1) is None


def test_the_check_takes_few_products_where_the_pairs_stand_out() -> None:
    values = 0.05 * torch.rand(2000, generator=rng(0), dtype=torch.float64) ** 8
    values[:10] = torch.tensor([10, 8, 7, 6, 5, 4, 3, 2.5, 2, 0.3], dtype=torch.float64) / 10
    A = as_operator(torch.diag(values))
    for seed in range(5):
        one, two = (eigenpairs(A, 10, rtol=1e-3, block_size=b, residuals="recursion", generator=rng(seed)) for b in (1, 2))
        assert one.converged
        assert two.converged
        assert one.num_products <= 30
    with_copies = values.clone()
    with_copies[10:12] = 0.8
    for seed in range(20):
        pairs = eigenpairs(as_operator(torch.diag(with_copies)), 10, rtol=1e-3, generator=rng(seed))
        assert torch.allclose(pairs.values, with_copies.sort(descending=True).values[:10], atol=1e-3)
