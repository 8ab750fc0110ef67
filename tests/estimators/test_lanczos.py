from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatminima.estimators import lanczos
from flatminima.operators import as_operator
from tests.estimators.spectra import diag, indefinite, rng, rotated

DTYPES = [torch.float32, torch.float64]


def start(n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=rng(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_rotated", [False, True])
def test_repeated_eigenvalues_end_the_recursion_without_ghosts(dtype: torch.dtype, is_rotated: bool) -> None:
    values = torch.tensor([2.0, 2, 2, 5, 5, 5], dtype=torch.float64)
    M = rotated(values) if is_rotated else torch.diag(values)
    T = lanczos(as_operator(M.to(dtype)), start(6, dtype), 100)
    assert T.breakdown
    assert T.num_products == 2
    tol = 20 * torch.finfo(dtype).eps
    assert torch.allclose(torch.linalg.eigvalsh(T.to_dense()), torch.tensor([2.0, 5.0], dtype=torch.float64), rtol=tol)
    assert float(T.remainder) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_steps_than_rows_give_every_eigenvalue_once(dtype: torch.dtype) -> None:
    T = lanczos(diag(*range(10, 0, -1), dtype=dtype), torch.ones(10, dtype=dtype), 120)
    values = torch.linalg.eigvalsh(T.to_dense())
    assert values.shape == (10,)
    assert T.breakdown
    assert torch.allclose(values, torch.arange(1, 11, dtype=torch.float64), rtol=100 * torch.finfo(dtype).eps)


def test_zero_and_one_by_one_matrices_end_after_one_step() -> None:
    zero = lanczos(as_operator(torch.zeros(4, 4)), torch.ones(4), 10)
    assert (zero.alphas.tolist(), zero.betas.tolist(), zero.breakdown) == ([0.0], [], True)
    one = lanczos(diag(-7), torch.tensor([3.0], dtype=torch.float64), 10)
    assert (one.alphas.tolist(), one.betas.tolist(), one.breakdown) == ([-7.0], [], True)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 10**6), st.sampled_from(DTYPES), st.floats(-20, 20))
def test_the_recursion_holds_with_an_orthonormal_basis(
    n: int, steps: int, seed: int, dtype: torch.dtype, log_scale: float
) -> None:
    M = (10**log_scale * rotated(torch.randn(n, generator=rng(seed), dtype=torch.float64), seed)).to(dtype)
    T = lanczos(as_operator(M), start(n, dtype, seed + 1), steps)
    m = T.num_products
    tol = 100 * n**0.5 * torch.finfo(dtype).eps
    V = T.basis
    assert m == min(steps, n) or T.breakdown
    assert torch.allclose(V.T @ V, torch.eye(m, dtype=dtype), atol=tol)
    R = (M @ V).double() - V.double() @ T.to_dense()
    scale = torch.linalg.matrix_norm(M.double(), 2)
    assert torch.linalg.vector_norm(R[:, :-1].double()) <= tol * scale
    assert torch.linalg.vector_norm(R[:, -1].double()) == pytest.approx(float(T.remainder), rel=1e-3, abs=float(2 * tol * scale))


def test_shifting_the_matrix_shifts_the_alphas_alone() -> None:
    M = rotated(indefinite())
    v = start(60)
    first = lanczos(as_operator(M), v, 20)
    second = lanczos(as_operator(M + 3 * torch.eye(60, dtype=torch.float64)), v, 20)
    assert torch.allclose(second.alphas, first.alphas + 3, atol=1e-10)
    assert torch.allclose(second.betas, first.betas, atol=1e-10)


def test_the_length_of_the_start_vector_does_not_matter() -> None:
    A = as_operator(rotated(indefinite()).float())
    v = start(60, torch.float32)
    expected = lanczos(A, v, 10).alphas
    for factor in (1e-30, -1e30):
        assert torch.allclose(lanczos(A, factor * v, 10).alphas, expected, atol=1e-5)


def test_bad_arguments_are_named() -> None:
    A = diag(1, 2, 3)
    with pytest.raises(ValueError, match=r"`v0` must have shape \(3,\).*Got \(2,\)"):
        lanczos(A, torch.ones(2, dtype=torch.float64), 2)
    with pytest.raises(ValueError, match="`v0` must be a finite vector other than 0"):
        lanczos(A, torch.zeros(3, dtype=torch.float64), 2)
    with pytest.raises(ValueError, match="`num_steps` must be at least 1"):
        lanczos(A, torch.ones(3, dtype=torch.float64), 0)
    with pytest.raises(TypeError, match="`A` must be a LinearOperator"):
        lanczos(torch.eye(3), torch.ones(3), 2)
