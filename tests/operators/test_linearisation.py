"""Products with the Jacobian are right, or the reason why there are none is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima._errors import NotSupported
from flatminima.estimators import trace
from flatminima.objective import Objective
from flatminima.operators import EmpiricalFisher, GaussNewton

D64 = torch.float64
Y = torch.tensor([0, 1, 2, 1, 0, 2])


def _gradients(model: nn.Module, values: Tensor) -> Tensor:
    parameters = list(model.parameters())
    rows = [torch.autograd.grad(v, parameters, retain_graph=True) for v in values.reshape(-1)]
    return torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows])


def _dense(model: nn.Module, *inputs: Tensor) -> Tensor:
    """The Gauss-Newton matrix of cross-entropy from first derivatives alone."""
    o = model(*inputs)
    p = o.detach().softmax(1)
    J = _gradients(model, o).reshape(*o.shape, -1)
    curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return torch.einsum("bkn,bkl,blm->nm", J, curvature, J) / len(o)


class Bags(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(5, 3, **settings), nn.Linear(3, 3)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.bag(*inputs)))


def _bags(**settings: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Bags(**settings).double()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_bags_of_embeddings_have_a_gauss_newton_matrix(mode: str, padding_idx: int | None) -> None:
    model = _bags(mode=mode, padding_idx=padding_idx)
    x = torch.randint(0, 5, (6, 4), generator=torch.Generator().manual_seed(0))
    x[1] = 2  # an empty bag, where 2 is padding
    objective = Objective(model, F.cross_entropy, [(x[:4], Y[:4]), (x[4:], Y[4:])])
    G = GaussNewton(objective)
    torch.testing.assert_close(G.to_dense(), _dense(model, x), rtol=1e-10, atol=1e-14)
    assert float(trace(G)) == pytest.approx(float(_dense(model, x).trace()))


@pytest.mark.parametrize("include_last_offset", [False, True])
def test_ragged_and_weighted_bags_have_a_gauss_newton_matrix(include_last_offset: bool) -> None:
    model = _bags(mode="sum", include_last_offset=include_last_offset)
    x = torch.tensor([0, 3, 4, 1, 1, 2, 0, 4])
    offsets = torch.tensor([0, 1, 3, 3, 6, 7] + [8] * include_last_offset)
    weights = torch.linspace(-1, 1, 8, dtype=D64)

    def batch_size(_batch: Any) -> int:
        return 6

    objective = Objective(model, lambda o, y: F.cross_entropy(o, y), (x, offsets, weights, Y), num_terms=batch_size)
    torch.testing.assert_close(GaussNewton(objective).to_dense(), _dense(model, x, offsets, weights), rtol=1e-10, atol=1e-14)


def _sine(factor: float | None) -> type[torch.autograd.Function]:
    """A sine that torch may differentiate once, with a derivative in forward mode (None: without one)."""

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.sin()

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            ctx.save_for_backward(inputs[0])
            ctx.save_for_forward(inputs[0])

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * ctx.saved_tensors[0].cos()

    if factor is not None:
        Sine.jvp = staticmethod(lambda ctx, tangent: factor * tangent * ctx.saved_tensors[0].cos())
    return Sine


class WithFunction(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function, self.first, self.second = function, nn.Linear(3, 4, dtype=D64), nn.Linear(4, 3, dtype=D64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function.apply(self.first(x)))


X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=D64)


@pytest.mark.parametrize("build", [GaussNewton, EmpiricalFisher])
def test_a_function_without_second_derivative_is_differentiated_in_forward_mode(build: Callable[[Objective], Any]) -> None:
    model = WithFunction(_sine(1.0))
    A = build(Objective(model, F.cross_entropy, (X, Y)))
    expected = _dense(model, X)
    if build is EmpiricalFisher:
        g = _gradients(model, F.cross_entropy(model(X), Y, reduction="none"))
        expected = g.T @ g / 6
    torch.testing.assert_close(A.to_dense(), expected, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(A.block(model.first).to_dense(), expected[:16, :16], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("factor", "reason"), [(2.0, r"forward mode: uᵀ\(J v\) = "), (None, "forward mode: .*jvp")])
def test_a_wrong_or_missing_derivative_is_refused_with_its_reason(factor: float | None, reason: str) -> None:
    G = GaussNewton(Objective(WithFunction(_sine(factor)), F.cross_entropy, (X, Y)))
    with pytest.raises(NotSupported, match=f"no second derivative for an operation of this model.*{reason}"):
        G @ torch.ones(G.size, dtype=D64)


def test_nothing_of_the_size_of_the_vocabulary_squared_is_formed() -> None:
    model = nn.Sequential(nn.Embedding(6, 2), nn.Linear(2, 50_000))
    G = GaussNewton(Objective(model, lambda o, y: F.cross_entropy(o, y), (torch.arange(6), 7 * torch.arange(6))))
    H = GaussNewton(Objective(model, F.cross_entropy, (torch.arange(6), 7 * torch.arange(6))))
    v = torch.randn(G.size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(G @ v, H @ v, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_models_have_results_in_single_precision(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
    x = X.to(dtype)
    exact = GaussNewton(Objective(model, F.cross_entropy, (x, Y), dtype=torch.float32))
    v = torch.randn(exact.size, generator=torch.Generator().manual_seed(0))
    for build in (GaussNewton, EmpiricalFisher):
        A = build(Objective(model, F.cross_entropy, (x, Y)))
        assert (A.dtype, (A @ v).dtype) == (torch.float32, torch.float32)
    found = GaussNewton(Objective(model, F.cross_entropy, (x, Y))) @ v
    assert (found - exact @ v).norm() < 20 * torch.finfo(dtype).eps * (exact @ v).norm()


@pytest.mark.parametrize("build", [GaussNewton, EmpiricalFisher])
def test_a_product_that_overflows_warns_once(build: Callable[[Objective], Any]) -> None:
    model = nn.Linear(3, 3).half()
    with torch.no_grad():
        model.weight.fill_(0.1)
    A = build(Objective(model, F.mse_loss, (torch.full((2, 3), 200.0).half(), torch.zeros(2, 3).half())))
    with pytest.warns(RuntimeWarning, match="overflowed") as caught:
        (2 * A).shift(1.0) @ torch.ones(12)
    assert len(caught) == 1


class Branching(nn.Module):
    """Looks at values on the way, which several vectors together cannot."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.conv, self.head, self.looks = nn.Conv1d(1, 2, 2, dtype=D64), nn.Linear(4, 3, dtype=D64), looks

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.conv(x[:, None])).flatten(1)
        return self.head(h if not self.looks or float(h.detach().sum()) > -1e9 else -h)


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("k", [1, 2, 11])
def test_several_vectors_through_a_convolution_have_the_products_of_each(looks: bool, k: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Branching(looks)
    V = torch.randn(sum(p.numel() for p in model.parameters()), k, generator=torch.Generator().manual_seed(0), dtype=D64)
    G = GaussNewton(Objective(model, F.cross_entropy, [(X[:4], Y[:4]), (X[4:], Y[4:])]))
    for _ in range(3):
        torch.testing.assert_close(G @ V, _dense(model, X) @ V, rtol=1e-10, atol=1e-14)
    assert torch.equal(G @ V, G @ V)


def test_one_forward_pass_serves_all_vectors_and_both_directions() -> None:
    model = Branching(False)
    calls: list[int] = []
    objective = Objective(model, F.cross_entropy, (X, Y))
    model.register_forward_hook(lambda *_: calls.append(1))
    V = torch.ones(objective.space.size, 3, dtype=D64)
    GaussNewton(objective) @ V  # looks how large the graphs of a few examples are
    counts = []
    for point in (objective, objective.at(objective.theta + 1)):
        calls.clear()
        GaussNewton(point) @ V
        counts.append(len(calls))
    assert counts == [1, 1]
