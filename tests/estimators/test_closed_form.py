"""When there is no closed form, the exact route says so instead of giving a number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima._errors import NotSupported
from flatminima.estimators import diagonal, trace
from flatminima.estimators.gauss_newton_diagonal import gauss_newton_squares
from flatminima.objective import Objective
from flatminima.operators import GaussNewton, Hessian, LinearOperator

D64 = torch.float64
g = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 3, generator=g, dtype=D64), torch.randint(0, 3, (8,), generator=g)


def _network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    """Every example against every other: no loss of single examples."""
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


class TupleParameter(nn.Module):
    """No layer with a rule: only per-example gradients apply."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 3, generator=torch.Generator().manual_seed(1), dtype=D64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.matrix)


@pytest.mark.parametrize("build", [_network, TupleParameter])
def test_a_loss_that_couples_examples_has_no_exact_diagonal_and_is_sampled(build: type[nn.Module]) -> None:
    G = GaussNewton(Objective(build(), contrastive, (X, Y)))
    with pytest.raises(NotSupported, match="couples examples"):
        gauss_newton_squares(G, diagonal=True)
    estimate = trace(G, num_products=400, generator=torch.Generator().manual_seed(0))
    assert abs(float(estimate) - G.to_dense().trace().item()) <= 4 * float(estimate.stderr) + 1e-9


def test_train_mode_batch_norm_couples_examples() -> None:
    G = GaussNewton(Objective(_network(), F.cross_entropy, (X, Y), mode="train"))
    with pytest.raises(NotSupported, match="coupled"):
        gauss_newton_squares(G, diagonal=False)


@pytest.mark.parametrize("kind", [GaussNewton, Hessian])
def test_combinations_keep_the_exact_diagonal(kind: type[GaussNewton | Hessian]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    A = kind(Objective(model, F.cross_entropy, (X, Y)))
    d = torch.rand(A.size, generator=torch.Generator().manual_seed(2), dtype=D64) + 0.5
    combined: dict[str, LinearOperator] = {
        "scaled": 2.5 * A, "congruence": A.congruence(d), "block": A.block("0"), "sum": A + A.congruence(d), "shift": A - 0.5 * A,
    }  # fmt: skip
    for name, operator in combined.items():
        found = diagonal(operator, generator=torch.Generator().manual_seed(3))
        torch.testing.assert_close(found.value, operator.to_dense().diagonal(), rtol=1e-9, atol=1e-12, msg=name)
        assert float(found.stderr.max()) <= 1e-9


def test_many_classes_need_no_matrix_of_classes_per_example() -> None:
    model = nn.Linear(2, 600, bias=False).double()
    x, y = torch.ones(3, 2, dtype=D64), torch.tensor([0, 1, 2])
    p = model(x).softmax(1).detach()
    expected = ((p - p.square()).sum(1) * x.square().sum(1)).mean()
    assert float(trace(GaussNewton(Objective(model, F.cross_entropy, (x, y))))) == pytest.approx(expected.item(), rel=1e-10)


def test_tiny_probabilities_lose_no_curvature() -> None:
    model = nn.Linear(1, 3, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[400.0], [0.0], [-400.0]]))
    G = GaussNewton(Objective(model, F.cross_entropy, (torch.ones(1, 1, dtype=D64), torch.tensor([1]))))
    p = torch.tensor([400.0, 0.0, -400.0], dtype=D64).softmax(0)
    others = torch.stack([p[1] + p[2], p[0] + p[2], p[0] + p[1]])  # 1 − p would round to 0
    torch.testing.assert_close(diagonal(G).value, p * others, rtol=1e-9, atol=0)
