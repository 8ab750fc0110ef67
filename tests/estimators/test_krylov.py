from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flatminima.estimators import Eigenpairs, eigenpairs, lanczos
from flatminima.estimators.krylov import KrylovSpace
from flatminima.operators import LinearOperator, as_operator
from tests.estimators.spectra import diag, indefinite, rng, rotated

SPIKED = torch.cat([torch.linspace(-0.2, 0.3, 290), torch.tensor([9.0, 7, 5, 3, 2, 1, 0.8, 0.6, 0.5, 0.4])]).double()


class Diagonal(LinearOperator):
    """diag(d), which counts products and calls, and is interrupted at the given product."""

    def __init__(self, d: Tensor, end: float = torch.inf) -> None:
        self.d, self.end, self.count, self.calls = d, end, 0, 0

    @property
    def size(self) -> int:
        return self.d.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.d.dtype

    @property
    def device(self) -> torch.device:
        return self.d.device

    @property
    def blocks(self) -> Mapping[str, slice]:
        return {"all": slice(0, self.size)}

    def _matmat(self, V: Tensor) -> Tensor:
        if self.count + V.shape[1] > self.end:
            raise KeyboardInterrupt
        self.count, self.calls = self.count + V.shape[1], self.calls + 1
        return self.d[:, None] * V


def assert_equal(one: Eigenpairs, other: Eigenpairs) -> None:
    assert torch.equal(one.values, other.values)
    assert torch.equal(one.vectors, other.vectors)
    assert torch.equal(one.residuals, other.residuals)
    assert one.to_dict() == other.to_dict()


@settings(max_examples=40, deadline=None)
@given(st.integers(6, 40), st.integers(1, 5), st.integers(0, 10**6), st.sampled_from([0, 2]), st.booleans())
def test_the_identity_holds_through_blocks_restarts_and_breakdowns(
    n: int, width: int, seed: int, decimals: int, is_single: bool
) -> None:
    values = torch.randn(n, generator=rng(seed), dtype=torch.float64).round(decimals=decimals)
    M = rotated(values, seed).to(torch.float32 if is_single else torch.float64)
    space = KrylovSpace(as_operator(M), n, rng(seed))
    for _ in range(width):
        space.start()
    tol = 500 * torch.finfo(M.dtype).eps * (1 + float(values.abs().max()))
    for step in range(6):
        chains = list(space.chains)[: n - space.dimension] or [space.start()]
        if chains == [None]:
            break
        space.expand(chains)
        m = space.dimension
        V, Q = space._rows[:m].T, space._Q.T
        basis = torch.cat([V, Q], dim=1)
        assert torch.allclose(basis.T @ basis, torch.eye(basis.shape[1], dtype=M.dtype), atol=tol)
        leaving = M @ V - V @ space._T[:m, :m].to(M) - Q @ space._C[:, :m].to(M)
        assert float(leaving.abs().max()) <= tol
        if step == 3 and m > 2:
            ritz, S = space.ritz()
            space.restart(ritz[-2:], S[:, -2:])


def test_the_basis_is_orthogonal_after_200_steps_in_float32() -> None:
    d = torch.rand(20_000, generator=rng(0)) ** 6
    T = lanczos(Diagonal(d), torch.randn(20_000, generator=rng(1)), 200)
    V = T.basis.double()
    assert T.num_products == 200
    assert torch.allclose(V.T @ V, torch.eye(200, dtype=torch.float64), atol=1e-6)
    assert T.alphas.dtype == T.betas.dtype == torch.float64


def test_half_precision_products_keep_a_basis_in_float32() -> None:
    A = Diagonal(torch.tensor([8.0, 4, 2, *[0.5] * 200]).bfloat16())
    pairs = eigenpairs(A, 3, generator=rng(0), rtol=0.02)
    assert pairs.vectors.dtype == pairs.values.dtype == torch.float32
    assert torch.allclose(pairs.values, torch.tensor([8.0, 4, 2]), rtol=0.02)
    assert torch.allclose(pairs.vectors.T @ pairs.vectors, torch.eye(3), atol=1e-5)


@pytest.mark.parametrize("n", [1, 7, 30])
@pytest.mark.parametrize("which", ["LA", "SA", "LM", "BE"])
def test_a_small_matrix_is_formed_and_answered_densely(n: int, which: str) -> None:
    k = max(1, n // 10)
    values = torch.randn(n, generator=rng(n), dtype=torch.float64)
    A = Diagonal(values)
    pairs = eigenpairs(A, k, which=which)
    assert (pairs.method, pairs.num_products, A.count, pairs.converged) == ("dense", n, n, True)
    assert float(pairs.residuals.max()) <= 1e-14
    iterative = eigenpairs(Diagonal(values), k, which=which, max_seconds=100.0, generator=rng(0))
    assert iterative.method == "lanczos"
    assert torch.allclose(pairs.values, iterative.values, atol=1e-8)


def test_the_whole_matrix_is_not_formed_where_a_limit_forbids_it() -> None:
    d = torch.randn(30, generator=rng(0), dtype=torch.float64)
    for limit in ({"max_products": 20}, {"max_basis": 10}, {"max_seconds": 9.0}, {"initial": torch.ones(30)}):
        assert eigenpairs(Diagonal(d), 3, generator=rng(0), **limit).method == "lanczos"
    assert eigenpairs(Diagonal(torch.rand(31)), 3, generator=rng(0)).method == "lanczos"


@pytest.mark.parametrize("residuals", ["products", "recursion"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 8])
def test_no_more_products_than_allowed_are_made_and_each_is_counted(block_size: int, residuals: str) -> None:
    d = torch.rand(500, generator=rng(0), dtype=torch.float64)
    for limit in range(8, 40, 3):
        A = Diagonal(d)
        pairs = eigenpairs(A, 4, block_size=block_size, residuals=residuals, max_products=limit, generator=rng(0))
        assert A.count == pairs.num_products <= limit
        assert not pairs.converged


@pytest.mark.parametrize("which", ["LA", "SA", "LM", "BE"])
@pytest.mark.parametrize("block_size", [2, 4])
@pytest.mark.parametrize("max_basis", [None, 30])
def test_blocks_find_the_same_pairs_with_fewer_calls(which: str, block_size: int, max_basis: int | None) -> None:
    one, several = Diagonal(SPIKED), Diagonal(SPIKED)
    first = eigenpairs(one, 4, which=which, max_basis=max_basis, generator=rng(0))
    second = eigenpairs(several, 4, which=which, max_basis=max_basis, block_size=block_size, generator=rng(0))
    assert first.converged
    assert second.converged
    assert torch.allclose(first.values, second.values, atol=1e-8)
    assert several.calls < one.calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_residuals_by_the_recursion_are_those_by_products_to_rounding(dtype: torch.dtype) -> None:
    A = Diagonal(SPIKED.to(dtype))
    by_products, by_recursion = (
        eigenpairs(A, 6, rtol=1e-3, residuals=residuals, generator=rng(0)) for residuals in ("products", "recursion")
    )
    eps = torch.finfo(dtype).eps
    assert by_recursion.num_products == by_products.num_products - 5
    assert torch.allclose(by_recursion.values, by_products.values, atol=1e2 * eps)
    assert torch.allclose(by_recursion.residuals, by_products.residuals, rtol=0.01, atol=1e3 * eps)


def test_residuals_by_the_recursion_show_products_that_are_not_symmetric() -> None:
    class Skewed(Diagonal):
        def _matmat(self, V: Tensor) -> Tensor:
            return super()._matmat(V) + 0.5 * V.roll(1, 0)

    A = Skewed(SPIKED)  # type: ignore[abstract]
    pairs = eigenpairs(A, 4, rtol=1e-3, max_products=60, residuals="recursion", generator=rng(0))
    assert not pairs.converged
    assert float(pairs.residuals.min()) > 0.1


def test_vectors_of_the_same_point_cost_a_product_each_and_a_check() -> None:
    cold = eigenpairs(Diagonal(SPIKED), 5, generator=rng(0))
    A = Diagonal(SPIKED)
    warm = eigenpairs(A, 5, initial=cold.vectors, rtol=1e-6, generator=rng(1))
    assert warm.converged
    assert torch.allclose(warm.values, cold.values, atol=1e-9)
    assert A.count == warm.num_products <= 5 + 10
    AX = SPIKED[:, None] * warm.vectors
    assert torch.allclose(torch.linalg.vector_norm(AX - warm.vectors * warm.values, dim=0), warm.residuals, atol=1e-12)


def test_vectors_of_a_nearby_point_save_products() -> None:
    E = 0.01 * rotated(torch.randn(300, generator=rng(5), dtype=torch.float64), 5)
    A = as_operator(torch.diag(SPIKED) + E)
    old = eigenpairs(Diagonal(SPIKED), 6, rtol=1e-3, generator=rng(0))
    cold = eigenpairs(A, 6, rtol=1e-3, generator=rng(0))
    warm = eigenpairs(A, 6, rtol=1e-3, initial=old.vectors, generator=rng(0))
    assert warm.converged
    assert torch.allclose(warm.values, cold.values, atol=1e-3)
    assert warm.num_products < cold.num_products


def test_warm_copies_are_taken_in_and_what_the_given_vectors_miss_is_found() -> None:
    values = SPIKED.clone()
    values[:3] = 9.0  # four in all
    cold = eigenpairs(Diagonal(values), 5, generator=rng(0))
    warm = eigenpairs(Diagonal(values), 5, initial=cold.vectors, generator=rng(1))
    assert torch.allclose(warm.values, torch.tensor([9.0, 9, 9, 9, 7], dtype=torch.float64))
    assert warm.num_products < cold.num_products
    partial = eigenpairs(Diagonal(values), 5, initial=cold.vectors[:, 3:], generator=rng(1))
    assert torch.allclose(partial.values, warm.values)


RUNS = [
    {"k": 4},
    {"k": 4, "block_size": 3},
    {"k": 4, "which": "BE", "max_basis": 20},
    {"k": 4, "which": "SA", "residuals": "recursion"},
    {"k": 3, "initial": torch.ones(300, 2, dtype=torch.float64).cumsum(0) ** torch.tensor([0.0, 1.0])},
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(str(v) for v in run.values() if not isinstance(v, Tensor)))
@pytest.mark.parametrize("share", [0.2, 0.6, 0.95])
def test_an_interrupted_run_goes_on_to_the_same_pairs_bit_for_bit(run: dict, share: float, tmp_path: Path) -> None:
    d = SPIKED.clone()
    d[:2] = 7.0  # copies: the check finds something
    whole = Diagonal(d)
    expected = eigenpairs(whole, **run, generator=rng(3))
    file = tmp_path / "state"
    broken = Diagonal(d, end=max(2, int(share * expected.num_products)))
    with pytest.raises(KeyboardInterrupt):
        eigenpairs(broken, **run, generator=rng(3), resume=file)
    assert file.exists()
    rest = Diagonal(d)
    result = eigenpairs(rest, **run, generator=rng(3), resume=file)
    assert not file.exists()
    assert_equal(result, expected)
    if share > 0.5 and "initial" not in run:
        assert rest.count < whole.count


def test_the_file_of_another_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        eigenpairs(Diagonal(SPIKED, end=12), 4, generator=rng(0), resume=file)
    before = file.read_bytes()
    with pytest.raises(ValueError, match="of another run: k is 4 there and 3 here"):
        eigenpairs(Diagonal(SPIKED), 3, max_products=1080, generator=rng(0), resume=file)
    with pytest.raises(ValueError, match="its operator gives another product"):
        eigenpairs(Diagonal(2 * SPIKED), 4, generator=rng(0), resume=file)
    assert file.read_bytes() == before


def test_progress_is_told_the_number_of_products_and_may_stop_the_work() -> None:
    seen: list[int] = []
    pairs = eigenpairs(Diagonal(SPIKED), 4, generator=rng(0), progress=lambda done, total, message: seen.append(done))
    assert seen == sorted(seen)
    assert 1 <= len(seen) <= pairs.num_products

    def stop(done: int, total: int | None, message: str) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        eigenpairs(Diagonal(SPIKED), 4, generator=rng(0), progress=stop)
    with pytest.raises(InterruptedError):
        eigenpairs(diag(1, 2), progress=stop)


def test_2000_values_at_both_ends_are_those_of_the_diagonal() -> None:
    d = indefinite(2000) ** 3
    pairs = eigenpairs(Diagonal(d), 3, which="BE", rtol=1e-6, generator=rng(0))
    assert pairs.converged
    assert torch.allclose(pairs.values, torch.cat([d.flip(0)[:3], d[:3].flip(0)]), atol=1e-6)


def test_bad_choices_are_named() -> None:
    with pytest.raises(ValueError, match="`block_size` must be at least 1"):
        eigenpairs(diag(1, 2, 3), block_size=0)
    with pytest.raises(ValueError, match="`residuals` must be one of products, recursion"):
        eigenpairs(diag(1, 2, 3), residuals="none")
    with pytest.raises(TypeError, match="`resume` must be a file's name"):
        eigenpairs(Diagonal(SPIKED), resume=3)
