"""Operators made of others are the matrices that their formulas say, and are refused where they would be none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima.estimators import block_traces, diagonal, eigenpairs, trace
from flatminima.objective import Objective
from flatminima.operators import EmpiricalFisher, Fisher, GaussNewton, LinearOperator, as_operator
from flatminima.operators.low_rank import LowRank

D64 = torch.float64
BLOCKS = {"a.weight": slice(0, 2), "a.bias": slice(2, 3), "b.weight": slice(3, 6)}


def _symmetric(seed: int) -> Tensor:
    A = torch.randn(6, 6, generator=torch.Generator().manual_seed(seed), dtype=D64)
    return A + A.T


def _operator(seed: int) -> tuple[LinearOperator, Tensor]:
    A = _symmetric(seed)
    return as_operator(A, blocks=BLOCKS), A


Step = Callable[[LinearOperator, Tensor, float, Tensor], tuple[LinearOperator, Tensor]]

STEPS: dict[str, Step] = {
    "sum": lambda A, M, c, d: (A + as_operator(torch.diag(d), blocks=BLOCKS), M + torch.diag(d)),
    "difference": lambda A, M, c, d: (A - as_operator(torch.outer(d, d), blocks=BLOCKS), M - torch.outer(d, d)),
    "negative": lambda A, M, c, d: (-A, -M),
    "multiple": lambda A, M, c, d: (c * A, c * M),
    "tensor multiple": lambda A, M, c, d: (A * d[0], M * d[0]),
    "shift": lambda A, M, c, d: (A.shift(c), M + c * torch.eye(6, dtype=D64)),
    "congruence": lambda A, M, c, d: (A.congruence(d), d[:, None] * M * d),
    "low rank": lambda A, M, c, d: (A + LowRank(d[:, None], BLOCKS), M + torch.outer(d, d)),
    "block diagonal": lambda A, M, c, d: (A.block_diagonal(["a", "b"]), M * _same_group()),
}


def _same_group() -> Tensor:
    return torch.block_diag(torch.ones(3, 3, dtype=D64), torch.ones(3, 3, dtype=D64))


@settings(deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5),
    seed=st.integers(0, 10_000),
    c=st.floats(-3, 3),
    k=st.integers(0, 3),
    pattern=st.sampled_from(["a", "*.weight", "b.weight", "*", ["a.bias", "b"]]),
)
def test_combined_operators_and_their_blocks_are_combined_matrices(
    names: list[str], seed: int, c: float, k: int, pattern: str | list[str]
) -> None:
    g = torch.Generator().manual_seed(seed + 1)
    A, M = _operator(seed)
    for name in names:
        A, M = STEPS[name](A, M, c, torch.randn(6, generator=g, dtype=D64))
    V = torch.randn(6, k, generator=g, dtype=D64)
    scale = 1 + float(M.abs().max())
    torch.testing.assert_close(A @ V, M @ V, atol=1e-12 * scale, rtol=1e-10)
    torch.testing.assert_close(A.to_dense(), A.to_dense().T, atol=1e-12 * scale, rtol=1e-10)
    block = A.block(pattern)
    rows = torch.cat([torch.arange(BLOCKS[name].start, BLOCKS[name].stop) for name in block.blocks])
    torch.testing.assert_close(block.to_dense(), M[rows][:, rows], atol=1e-12 * scale, rtol=1e-10)
    assert list(block.blocks) == [name for name in BLOCKS if name in block.blocks]


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 6))
def test_a_projection_is_the_compression_and_its_eigenvalues_interlace(seed: int, k: int) -> None:
    A, M = _operator(seed)
    Q = torch.linalg.qr(torch.randn(6, k, generator=torch.Generator().manual_seed(seed), dtype=D64)).Q
    P = A.projection(Q)
    assert P.shape == (k, k)
    torch.testing.assert_close(P.to_dense(), Q.T @ M @ Q)
    inner, outer = torch.linalg.eigvalsh(P.to_dense()), torch.linalg.eigvalsh(M)
    assert bool((inner >= outer[:k] - 1e-10).all())
    assert bool((inner <= outer[6 - k :] + 1e-10).all())


def test_a_projection_to_eigenvectors_has_their_eigenvalues() -> None:
    A, M = _operator(0)
    values, vectors = torch.linalg.eigh(M)
    torch.testing.assert_close(A.projection(vectors[:, 3:]).to_dense(), torch.diag(values[3:]), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("Q", "message"),
    [
        (torch.ones(6, 2, dtype=D64), "orthonormal columns"),
        (2 * torch.eye(6, dtype=D64), r"Take torch.linalg.qr\(Q\).Q"),
        (torch.eye(5, dtype=D64), r"shape \(6, k\)"),
        (torch.zeros(6, 0, dtype=D64), "1 <= k <= 6"),
        (torch.eye(6), "Call Q.to"),
        (torch.full((6, 1), torch.nan, dtype=D64), "orthonormal"),
    ],
)
def test_a_projection_to_anything_else_is_refused(Q: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _operator(0)[0].projection(Q)


@pytest.mark.parametrize(
    "number", [2, 2.0, torch.tensor(2.0), torch.tensor(2), np.float64(2), np.float32(2), np.int64(2), np.array(2.0)]
)
def test_any_real_number_scales_from_either_side(number: object) -> None:
    A, M = _operator(0)
    for scaled in (number * A, A * number):  # type: ignore[operator]
        assert isinstance(scaled, LinearOperator)
        torch.testing.assert_close(scaled.to_dense(), 2 * M)
    torch.testing.assert_close(A.shift(number).to_dense(), M + 2 * torch.eye(6, dtype=D64))


@pytest.mark.parametrize("number", [1j, torch.tensor(1j), np.complex128(1j), True])
def test_a_number_that_is_not_real_is_refused(number: object) -> None:
    A, _ = _operator(0)
    with pytest.raises(TypeError, match="must be a real number"):
        A * number  # type: ignore[operator]
    with pytest.raises(TypeError, match="`c` must be a real number"):
        A.shift(number)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), torch.tensor(-torch.inf), np.float32("nan")])
def test_a_number_that_is_not_finite_is_refused(number: object) -> None:
    A, _ = _operator(0)
    with pytest.raises(ValueError, match="`factor` must be finite"):
        number * A  # type: ignore[operator]
    with pytest.raises(ValueError, match="`c` must be finite"):
        A.shift(number)


@pytest.mark.parametrize("factor", [torch.ones(6), np.ones(6), torch.ones(1)])
def test_a_vector_is_no_factor(factor: object) -> None:
    with pytest.raises(ValueError, match=r"one number. Got shape .*congruence"):
        _operator(0)[0] * factor  # type: ignore[operator]


@pytest.mark.parametrize("other", ["2", None, [1.0]])
def test_what_is_no_number_is_no_factor(other: object) -> None:
    with pytest.raises(TypeError):
        _operator(0)[0] * other  # type: ignore[operator]


def test_blocks_by_name_have_their_traces_and_largest_eigenvalues() -> None:
    H = torch.diag(torch.arange(1.0, 7.0, dtype=D64))
    A = as_operator(H, blocks={"a": slice(0, 2), "b": slice(2, 4), "c": slice(4, 6)})
    assert [float(trace(A.block(name), method="exact")) for name in "abc"] == [3, 7, 11]
    assert [float(eigenpairs(A.block(name)).values[0]) for name in "abc"] == pytest.approx([2, 4, 6])
    assert torch.equal(A.block_diagonal().to_dense(), H)
    assert {name: float(t) for name, t in block_traces(A.block_diagonal(), num_products=4).items()} == {"a": 3, "b": 7, "c": 11}


@pytest.mark.parametrize(
    ("selections", "message"),
    [
        (["a", "a.bias", "b"], r"hold every block once. Got 'a.bias' 2 times"),
        (["a"], r"hold every block once. Got 'b.weight' 0 times"),
        (["a", "b", "d"], "No parameter matches 'd'"),
    ],
)
def test_groups_that_are_no_partition_are_refused(selections: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _operator(0)[0].block_diagonal(selections)


@pytest.mark.parametrize("selection", [3, nn.Linear(2, 2), None, [3]])
def test_a_selection_of_an_operator_without_a_model_is_by_name(selection: object) -> None:
    with pytest.raises(TypeError, match="`selection` must be names"):
        _operator(0)[0].block(selection)  # type: ignore[arg-type]


def test_an_empty_selection_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must pick blocks of this operator\. Got nothing"):
        _operator(0)[0].block([])


def _network() -> tuple[nn.Sequential, Objective]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        x = torch.randn(8, 3, dtype=D64)
    return model, Objective(model, F.cross_entropy, [(x[:5], torch.arange(5) % 3), (x[5:], torch.arange(3))], l2=0.1)


OPERATORS = [
    GaussNewton,
    Fisher,
    lambda o: Fisher(o, num_samples=2, generator=torch.Generator().manual_seed(0)),
    EmpiricalFisher,
]


@pytest.mark.parametrize("build", OPERATORS)
def test_a_block_by_module_or_parameter_is_the_submatrix(build: Callable[[Objective], LinearOperator]) -> None:
    model, objective = _network()
    A = build(objective)
    dense, n = A.to_dense(), 16
    for selection in (model[0], "0", "0.*", [model[0].weight, model[0].bias], ["0.bias", model[0].weight]):
        block = A.block(selection)
        assert list(block.blocks) == ["0.weight", "0.bias"]
        torch.testing.assert_close(block.to_dense(), dense[:n, :n], rtol=1e-10, atol=1e-14)
    torch.testing.assert_close((2 * A).shift(1.0).block(model[2].bias).to_dense().diagonal(), 2 * dense.diagonal()[-3:] + 1)
    torch.testing.assert_close(A.block("0").block(model[0].bias).to_dense(), dense[12:16, 12:16])
    with pytest.raises(ValueError, match="foreign"):
        A.block(nn.Linear(3, 4))
    with pytest.raises(ValueError, match=r"must pick blocks of this operator\. Got 2.bias"):
        A.block("0").block(model[2])


def test_a_block_differentiates_in_its_own_parameters_alone() -> None:
    model, objective = _network()
    A = GaussNewton(objective).block(model[2])
    touched: list[int] = []

    def watch(_module: nn.Module, _args: object, output: Tensor) -> None:
        output.register_hook(lambda _gradient: touched.append(1))

    hook = model[0].register_forward_hook(watch)
    A @ torch.ones(A.size, dtype=D64)
    assert touched == []
    GaussNewton(objective) @ torch.ones(objective.space.size, dtype=D64)
    hook.remove()
    assert touched


@pytest.mark.parametrize("build", OPERATORS)
def test_shifts_blocks_and_block_diagonals_keep_closed_forms(build: Callable[[Objective], LinearOperator]) -> None:
    model, objective = _network()
    A = build(objective)
    d = torch.linspace(0.5, 2, A.size, dtype=D64)
    combined = (2 * A.shift(0.3)).congruence(d).block("0")
    for B in (A, A.shift(0.3), A.block(model[2]), A.block_diagonal(), combined, A + A.shift(1)):
        found = diagonal(B)
        assert found.method.startswith("exact")
        assert found.num_products == 0
        torch.testing.assert_close(found.value, B.to_dense().diagonal(), rtol=1e-9, atol=1e-13)
        assert float(trace(B)) == pytest.approx(float(B.to_dense().trace()))


class Recording(LinearOperator):
    """Notes how much memory it may keep."""

    size, dtype, device = 6, D64, torch.device("cpu")
    blocks = BLOCKS

    def __init__(self) -> None:
        self.kept: list[int] = []

    def _matmat(self, V: Tensor) -> Tensor:
        return V

    @contextmanager
    def keeping_graphs(self, max_bytes: int = 0):  # type: ignore[no-untyped-def]
        self.kept.append(max_bytes)
        yield
        self.kept.append(-max_bytes)


def test_wrappers_pass_the_memory_for_graphs_on() -> None:
    A, B = Recording(), Recording()
    combined = ((2 * A).shift(1.0).congruence(torch.ones(6, dtype=D64)) - B).projection(torch.eye(6, dtype=D64))
    with combined.keeping_graphs(100):
        assert (A.kept, B.kept) == ([50], [50])
    assert (A.kept, B.kept) == ([50, -50], [50, -50])
    C = Recording()
    with C.block_diagonal(["a", "b"]).keeping_graphs(100):
        assert C.kept == [50, 50]
    with C.block("a").keeping_graphs(30):
        assert C.kept[-1] == 30


def test_a_plain_operator_has_no_graphs_to_keep() -> None:
    A, M = _operator(0)
    with A.keeping_graphs():
        torch.testing.assert_close(A @ torch.ones(6, dtype=D64), M.sum(1))
