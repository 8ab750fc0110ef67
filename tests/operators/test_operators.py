"""The algebra of operators, and Hessians that one can work out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima._errors import NotSupported
from flatminima.objective import Objective
from flatminima.operators import GaussNewton, Hessian, LinearOperator, as_operator

D64 = torch.float64


def _symmetric(n: int, seed: int = 0) -> Tensor:
    A = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=D64)
    return A + A.T


class ReluPair(nn.Module):
    """f = v relu(w x) with one weight in each layer."""

    def __init__(self, w: float, v: float) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.tensor([w], dtype=D64)), nn.Parameter(torch.tensor([v], dtype=D64))

    def forward(self, x: Tensor) -> Tensor:
        return self.v * torch.relu(self.w * x)


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().mean()


def _pair(w: float, v: float, y: float) -> Objective:
    return Objective(ReluPair(w, v), half_square, (torch.ones(1, dtype=D64), torch.tensor([y], dtype=D64)))


@pytest.mark.parametrize(
    ("y", "hessian", "gauss_newton"),
    [(3.0, [[4, 1], [1, 1]], [[4, 2], [2, 1]]), (7.0, [[4, -3], [-3, 1]], [[4, 2], [2, 1]])],
)
def test_hessian_and_gauss_newton_differ_by_the_residual(
    y: float, hessian: list[list[float]], gauss_newton: list[list[float]]
) -> None:
    objective = _pair(1.0, 2.0, y)
    H, G = Hessian(objective).to_dense(), GaussNewton(objective).to_dense()
    torch.testing.assert_close(H, torch.tensor(hessian, dtype=D64))
    torch.testing.assert_close(G, torch.tensor(gauss_newton, dtype=D64))
    if y == 7.0:
        assert torch.linalg.eigvalsh(H)[0].item() == pytest.approx(-0.85410, abs=1e-5)


def test_rescaling_moves_the_trace_and_keeps_the_function_the_congruence_and_the_radial_curvature() -> None:
    for scale, trace in ((1.0, 2.0), (10.0, 100.01)):
        objective = _pair(scale, 1 / scale, 1.0)
        H, theta = Hessian(objective), objective.theta
        assert H.to_dense().trace().item() == pytest.approx(trace)
        assert torch.linalg.eigvalsh(H.congruence(theta).to_dense())[-1].item() == pytest.approx(2.0)
        assert (theta @ (H @ theta)).item() == pytest.approx(4.0)


def test_the_scale_of_a_normalised_weight_changes_its_curvature_by_the_square() -> None:
    class Normalised(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.w = nn.Parameter(scale * torch.tensor([0.6, -0.3, 0.9], dtype=D64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.w / self.w.norm())

    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=D64)
    largest = [
        torch.linalg.eigvalsh(Hessian(Objective(Normalised(c), half_square, (x, x[:, 0]))).to_dense())[-1] for c in (1.0, 2.0)
    ]
    assert (largest[0] / largest[1]).item() == pytest.approx(4.0)


def test_a_linear_model_has_one_and_the_same_hessian_and_gauss_newton() -> None:
    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([0.7], dtype=D64))

        def forward(self, x: Tensor) -> Tensor:
            return self.w * x

    objective = Objective(Line(), F.mse_loss, (torch.tensor([2.0], dtype=D64), torch.tensor([1.0], dtype=D64)))
    assert Hessian(objective).to_dense().item() == pytest.approx(8.0)
    assert GaussNewton(objective).to_dense().item() == pytest.approx(8.0)


def test_gauss_newton_is_psd_where_the_hessian_is_not() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 4, generator=g, dtype=D64), torch.randint(0, 3, (20,), generator=g)
    objective = Objective(model, F.cross_entropy, (x, y))
    assert torch.linalg.eigvalsh(Hessian(objective).to_dense())[0] < -1e-4
    assert torch.linalg.eigvalsh(GaussNewton(objective).to_dense())[0] > -1e-12


def test_gauss_newton_needs_to_know_the_outputs() -> None:
    w = torch.ones(2, requires_grad=True)
    with pytest.raises(NotSupported, match="closure"):
        GaussNewton(Objective.from_closure(lambda: w.square().sum(), [w]))

    def whole(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    with pytest.raises(NotSupported, match=r"loss\(outputs, targets\)"):
        GaussNewton(Objective(nn.Linear(2, 2), whole, (torch.ones(3, 2), torch.ones(3, 2))))


@given(seed=st.integers(0, 10_000), k=st.integers(0, 4))
def test_products_of_combined_operators_are_those_of_combined_matrices(seed: int, k: int) -> None:
    A, B = _symmetric(5, seed), _symmetric(5, seed + 1)
    g = torch.Generator().manual_seed(seed)
    d, V = torch.randn(5, generator=g, dtype=D64), torch.randn(5, k, generator=g, dtype=D64)
    combined = 2.0 * as_operator(A) - as_operator(B).congruence(d) + (-as_operator(A))
    torch.testing.assert_close(combined @ V, (A - d[:, None] * B * d) @ V)


def test_blocks_are_the_submatrices_that_their_names_pick() -> None:
    H = torch.diag(torch.arange(1.0, 7.0, dtype=D64))
    A = as_operator(H, blocks={"a": slice(0, 2), "b": slice(2, 4), "c": slice(4, 6)})
    assert [A.block(name).to_dense().trace().item() for name in "abc"] == [3, 7, 11]
    assert torch.equal(A.block("[ac]").to_dense(), torch.diag(torch.tensor([1.0, 2, 5, 6], dtype=D64)))
    with pytest.raises(ValueError, match="No parameter matches 'd'"):
        A.block("d")


def test_a_module_s_name_picks_the_block_of_all_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=D64)
    H = Hessian(Objective(model, F.mse_loss, (x, x[:, :1])))
    block = H.block("0")
    assert dict(block.blocks) == {"0.weight": slice(0, 4), "0.bias": slice(4, 6)}
    torch.testing.assert_close(block.to_dense(), H.to_dense()[:6, :6])


def test_scipy_sees_the_same_matrix() -> None:
    from scipy.sparse.linalg import eigsh

    A = _symmetric(12)
    largest = eigsh(as_operator(A).to_scipy(), k=1, which="LA", return_eigenvectors=False)
    assert largest[0] == pytest.approx(torch.linalg.eigvalsh(A)[-1].item())
    for vector in (torch.ones(12, dtype=D64), torch.ones(12, 1, dtype=D64)):
        product = as_operator(A).to_scipy() @ vector.numpy()
        assert product.shape == tuple(vector.shape)


def test_a_product_with_zero_is_exactly_zero() -> None:
    H = Hessian(_pair(1.0, 2.0, 3.0))
    assert torch.equal(H @ torch.zeros(2, dtype=D64), torch.zeros(2, dtype=D64))
    assert (H @ torch.zeros(2, 0, dtype=D64)).shape == (2, 0)


@pytest.mark.parametrize(
    ("v", "error", "message"),
    [
        (torch.ones(3, dtype=D64), ValueError, r"shape \(2,\) or \(2, k\). Got \(3,\)"),
        (torch.ones(1, 2, 1, dtype=D64), ValueError, "shape"),
        (torch.ones(2), ValueError, "Call v.to"),
        ([1.0, 2.0], TypeError, "must be a tensor"),
    ],
)
def test_a_vector_that_does_not_fit_is_refused(v: Tensor, error: type[Exception], message: str) -> None:
    operator: LinearOperator = as_operator(torch.eye(2, dtype=D64))
    with pytest.raises(error, match=message):
        operator @ v


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.ones(2, 3), r"shape \(n, n\)"),
        (torch.tensor([[1.0, 2.0], [0.0, 1.0]]), "symmetric"),
        (torch.eye(2, dtype=torch.long), "real floating point"),
    ],
)
def test_a_matrix_that_is_not_symmetric_and_real_is_refused(matrix: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_operator(matrix)


def test_summands_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="agree in shape"):
        as_operator(torch.eye(2)) + as_operator(torch.eye(3))


@pytest.mark.parametrize(
    "blocks",
    [
        {"a": slice(0, 2)},
        {"a": slice(0, 3), "b": slice(2, 4)},
        {"a": slice(0, 2), "b": slice(3, 4)},
        {"a": slice(0, 4, 2), "b": slice(2, 4)},
        {"a": slice(0, 9)},
    ],
)
def test_blocks_that_do_not_cover_the_rows_once_are_refused(blocks: dict[str, slice]) -> None:
    with pytest.raises(ValueError, match=r"`blocks` must"):
        as_operator(torch.eye(4, dtype=D64), blocks=blocks)


@pytest.mark.parametrize("operator", [Hessian, GaussNewton])
def test_a_loss_without_a_second_derivative_is_refused_by_name(operator: type[Hessian] | type[GaussNewton]) -> None:
    model = nn.Linear(3, 4, dtype=D64)
    A = operator(Objective(model, F.multi_margin_loss, (torch.ones(2, 3, dtype=D64), torch.tensor([0, 1]))))
    with pytest.raises(NotSupported, match="torch has no second derivative"):
        A @ torch.ones(A.size, dtype=D64)
