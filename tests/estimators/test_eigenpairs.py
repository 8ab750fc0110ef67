from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flatminima.estimators import Eigenpairs, eigenpairs
from flatminima.operators import LinearOperator, as_operator
from tests.estimators.spectra import diag, rng, rotated

DTYPES = [torch.float32, torch.float64]


def wanted(values: Tensor, k: int, which: str) -> Tensor:
    """Return what eigenpairs promises, from all eigenvalues."""
    v = values.sort(descending=True).values
    if which == "LM":
        return v[v.abs().argsort(descending=True, stable=True)[:k]].sort(descending=True).values
    if which == "BE" and 2 * k < v.numel():
        return torch.cat([v[:k], v[-k:]])
    return {"LA": v[:k], "SA": v[-k:], "BE": v}[which]


def check_pairs(A: LinearOperator, pairs: Eigenpairs, values: Tensor, tol: float) -> None:
    """Hold the pairs to their promises: values, order, orthonormal vectors, true residuals."""
    X = pairs.vectors
    scale = float(torch.linalg.matrix_norm(A.to_dense(), 2)) + 1e-300
    assert pairs.converged
    assert torch.allclose(pairs.values.double(), values, atol=tol * scale, rtol=0)
    assert (pairs.values.diff() <= 0).all()
    assert torch.allclose(X.T @ X, torch.eye(X.shape[1], dtype=A.dtype), atol=100 * torch.finfo(A.dtype).eps)
    residuals = torch.linalg.vector_norm(A @ X - X * pairs.values, dim=0)
    assert torch.allclose(residuals, pairs.residuals, atol=100 * torch.finfo(A.dtype).eps * scale)
    assert pairs.values.dtype == A.dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("which", "expected"), [("LA", [3]), ("SA", [-5]), ("LM", [-5]), ("BE", [3, -5])])
@pytest.mark.parametrize("initial", [None, (1, 1, 1), (0, 0, 1), (1, 0, 0), (0, 1, 0), (0, 1, 1), (1, 0, 1)])
def test_sign_and_order_are_right_for_any_start_vector(which: str, expected: list[float], initial, dtype: torch.dtype) -> None:
    A = diag(3, -5, 1, dtype=dtype)
    v = None if initial is None else torch.tensor(initial, dtype=dtype)
    pairs = eigenpairs(A, which=which, initial=v, generator=rng(0))
    check_pairs(A, pairs, torch.tensor(expected, dtype=torch.float64), 1e-6)


def test_a_start_vector_that_is_a_wrong_eigenvector_does_no_harm() -> None:
    A = as_operator(torch.tensor([[1.0, -2.0], [-2.0, 1.0]]))
    assert float(eigenpairs(A, initial=torch.ones(2)).values) == pytest.approx(3, rel=1e-6)
    values = torch.rand(1000, generator=rng(0), dtype=torch.float64)
    values[:2] = torch.tensor([10.0, 5.0])
    e = torch.zeros(1000, dtype=torch.float64)
    e[1] = 1
    for seed in range(20):
        pairs = eigenpairs(as_operator(torch.diag(values)), initial=e, generator=rng(seed))
        assert float(pairs.values) == pytest.approx(10, rel=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_of_an_eigenvalue_are_found(dtype: torch.dtype) -> None:
    A = diag(5, 5, 5, 2, 2, 2, dtype=dtype)
    check_pairs(A, eigenpairs(A, 4, generator=rng(0)), torch.tensor([5.0, 5, 5, 2], dtype=torch.float64), 1e-6)
    check_pairs(A, eigenpairs(A, 2, which="BE", generator=rng(0)), torch.tensor([5.0, 5, 2, 2], dtype=torch.float64), 1e-6)


@pytest.mark.parametrize("which", ["LA", "SA", "LM", "BE"])
@pytest.mark.parametrize("max_basis", [None, 30])
def test_copies_are_found_also_where_the_space_is_far_from_exhausted(which: str, max_basis: int | None) -> None:
    once = torch.rand(100, generator=rng(1), dtype=torch.float64) ** 2 - 0.3
    once[:3] = torch.tensor([2.0, 1.5, -1.0])
    values = once.repeat(3)
    for seed in range(5):
        A = as_operator(torch.diag(values))
        pairs = eigenpairs(A, 4, which=which, max_basis=max_basis, max_products=3000, generator=rng(seed))
        check_pairs(A, pairs, wanted(values, 4, which), 1e-7)


def test_a_block_of_equal_eigenvalues_costs_few_products() -> None:
    values = torch.cat([torch.full((500,), 5.0), torch.full((500,), 2.0)]).double()
    pairs = eigenpairs(as_operator(torch.diag(values)), 4, generator=rng(0))
    assert torch.allclose(pairs.values, torch.full((4,), 5.0, dtype=torch.float64))
    assert pairs.num_products <= 20


def test_both_ends_of_a_spiked_spectrum_within_25_products() -> None:
    for seed in range(10):
        values = torch.rand(1000, generator=rng(seed), dtype=torch.float64)
        values[17], values[400] = 100, -0.5
        pairs = eigenpairs(as_operator(torch.diag(values)), which="BE", generator=rng(seed))
        assert torch.allclose(pairs.values, torch.tensor([100, -0.5], dtype=torch.float64), atol=1e-8, rtol=0)
        assert pairs.num_products <= 25
        assert pairs.converged


@pytest.mark.parametrize("which", ["LA", "SA", "LM", "BE"])
def test_all_pairs_are_all_eigenvalues_each_once(which: str) -> None:
    A = diag(*range(10, 0, -1))
    check_pairs(A, eigenpairs(A, 10, which=which, generator=rng(0)), torch.arange(10, 0, -1, dtype=torch.float64), 1e-12)


def test_zero_and_one_by_one_matrices_work() -> None:
    zero = as_operator(torch.zeros(4, 4))
    check_pairs(zero, eigenpairs(zero, 3), torch.zeros(3, dtype=torch.float64), 0)
    one = diag(-7)
    for which in ("LA", "SA", "LM", "BE"):
        check_pairs(one, eigenpairs(one, which=which), torch.tensor([-7.0], dtype=torch.float64), 1e-15)


def test_copies_are_told_from_values_of_nearly_the_same_magnitude() -> None:
    # the copies of 2.01 come up one by one, while the two of −2 stand ready to take their places
    for seed in range(40):
        values = torch.randn(56, generator=rng(seed), dtype=torch.float64).round().clamp(-2, 2)
        values = values + 0.01 * (values > 0)
        A = as_operator(rotated(values, seed))
        pairs = eigenpairs(A, 4, which="LM", max_basis=14, generator=rng(seed))
        check_pairs(A, pairs, wanted(values, 4, "LM"), 1e-9)


@pytest.mark.parametrize("n", [60, 104])
def test_a_space_that_fills_up_with_several_chains_stays_orthonormal(n: int) -> None:
    # every value twice: the second chain starts where the first one's remainder is rounding
    for seed in range(5):
        values = torch.randn(n // 2, generator=rng(seed), dtype=torch.float64).round(decimals=1).repeat(2)
        A = as_operator(rotated(values, seed))
        for which in ("BE", "SA"):
            pairs = eigenpairs(A, 6, which=which, generator=rng(seed))
            check_pairs(A, pairs, wanted(values, 6, which), 1e-8)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))),
    st.sampled_from(["LA", "SA", "LM", "BE"]),
    st.integers(0, 10**6),
    st.sampled_from([0, 1, 2]),
)
def test_pairs_are_the_dense_ones(size: tuple[int, int], which: str, seed: int, decimals: int) -> None:
    n, k = size
    values = torch.randn(n, generator=rng(seed), dtype=torch.float64).round(decimals=decimals)  # 0 decimals: many copies
    values = values + 0.01 * (values > 0)  # no ties in magnitude between the signs
    A = as_operator(rotated(values, seed))
    pairs = eigenpairs(A, k, which=which, generator=rng(seed), max_products=2000)
    check_pairs(A, pairs, wanted(values, k, which), 1e-7)


@pytest.mark.parametrize("which", ["LA", "SA", "LM", "BE"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_restarts_find_the_same_pairs_in_bounded_memory(which: str, dtype: torch.dtype) -> None:
    values = torch.randn(400, generator=rng(2), dtype=torch.float64)
    A = as_operator(rotated(values).to(dtype))
    pairs = eigenpairs(A, 3, which=which, max_basis=20, max_products=2000, generator=rng(0))
    check_pairs(A, pairs, wanted(values, 3, which), 1e-3 if dtype == torch.float32 else 1e-8)
    assert pairs.num_products > 20


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_the_scale_of_the_matrix_does_not_matter_even_near_the_ends_of_float32(scale: float) -> None:
    values = torch.randn(60, generator=rng(0), dtype=torch.float64)
    A = as_operator((scale * rotated(values)).float())
    pairs = eigenpairs(A, 3, generator=rng(0))
    assert pairs.converged
    assert torch.allclose(pairs.values.double() / scale, wanted(values, 3, "LA"), rtol=1e-5)


def test_negating_the_matrix_swaps_the_ends() -> None:
    A = as_operator(rotated(torch.randn(50, generator=rng(0), dtype=torch.float64)))
    largest, smallest = eigenpairs(A, 3, generator=rng(1)), eigenpairs(-A, 3, which="SA", generator=rng(1))
    assert torch.allclose(largest.values, -smallest.values.flip(0), atol=1e-10)


@pytest.mark.parametrize("which", ["LA", "BE"])
def test_limits_end_the_search_unconverged_with_all_pairs(which: str) -> None:
    values = torch.rand(500, generator=rng(0), dtype=torch.float64)
    A = as_operator(torch.diag(values))
    for limit in ({"max_products": 20}, {"max_seconds": 1e-9}):
        pairs = eigenpairs(A, 3, which=which, generator=rng(0), **limit)
        assert not pairs.converged
        assert pairs.values.shape == pairs.residuals.shape == ({"LA": 3, "BE": 6}[which],)
        assert pairs.num_products <= 20
        # an eigenvalue lies within the residual of every value, converged or not
        distance = (pairs.values[:, None] - values).abs().min(1).values
        assert (distance <= pairs.residuals + 1e-14).all()


def test_the_vectors_of_an_earlier_call_save_products() -> None:
    values = torch.rand(400, generator=rng(0), dtype=torch.float64)
    A = as_operator(torch.diag(values))
    cold = eigenpairs(A, 3, generator=rng(0))
    warm = eigenpairs(A, 3, initial=cold.vectors, generator=rng(1))
    check_pairs(A, warm, wanted(values, 3, "LA"), 1e-8)
    assert warm.num_products < cold.num_products


def test_to_dict_is_json_without_the_vectors() -> None:
    result = json.loads(json.dumps(eigenpairs(diag(3, 1, 2), 2, generator=rng(0)).to_dict()))
    assert result["values"] == pytest.approx([3, 2])
    assert set(result) == {"values", "residuals", "converged", "num_products", "rtol", "method"}


def test_bad_arguments_are_named() -> None:
    A = diag(1, 2, 3)
    with pytest.raises(ValueError, match=r"`k` must be at least 1\. Got 0"):
        eigenpairs(A, 0)
    with pytest.raises(ValueError, match=r"`k` must be at most 3 \(a matrix of 3 rows has no more eigenvalues\). Got 4"):
        eigenpairs(A, 4)
    with pytest.raises(ValueError, match="`which` must be one of LA, SA, LM, BE"):
        eigenpairs(A, which="largest")
    with pytest.raises(ValueError, match="`max_products` must be at least 4"):
        eigenpairs(A, 2, max_products=3)
    with pytest.raises(ValueError, match="`max_basis` must be at least 3"):
        eigenpairs(A, 1, max_basis=2)
    with pytest.raises(ValueError, match=r"`initial` must be a tensor of shape \(3,\) or \(3, p\). Got \(2,\)"):
        eigenpairs(A, initial=torch.ones(2))
    with pytest.raises(ValueError, match="`initial` must be a finite vector other than 0"):
        eigenpairs(A, initial=torch.zeros(3))
    with pytest.raises(TypeError, match="`A` must be a LinearOperator"):
        eigenpairs(torch.eye(2))
    with pytest.raises(TypeError, match="`generator` must be"):
        eigenpairs(A, generator=0)
