"""Whether a point is a minimum, in terms that do not change with the coordinates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import flatminima as fm
from flatminima.trust.point import check_minimum, gauss_newton_fall, reference_loss
from tests.conformance.oracles import dense_gauss_newton

D64 = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(*layers: nn.Module, seed: int = 3) -> nn.Sequential:
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator(seed), dtype=D64) / max(1, p.shape[-1]) ** 0.5)
            seed += 1
    return model.double()


def mlp() -> nn.Sequential:
    return network(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))


X = torch.randn(60, 6, generator=generator(), dtype=D64)
Y = torch.randint(0, 3, (60,), generator=generator(1))


def train(model: nn.Module, num_steps: int, lr: float = 0.1) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for _ in range(num_steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    return model


def verdict(objective: fm.Objective) -> str:
    return check_minimum(objective, generator())[0].verdict


def test_the_fall_of_a_gauss_newton_step_is_that_of_the_dense_matrix() -> None:
    model = network(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 3))
    objective = fm.Objective(model, F.cross_entropy, (X[:, :3], Y))
    g = objective.gradient()
    G = dense_gauss_newton(model, F.cross_entropy, X[:, :3], Y)
    expected = float(g @ torch.linalg.pinv(G, hermitian=True, rtol=1e-11) @ g) / 2
    fall, num_products = gauss_newton_fall(objective, g)
    assert fall == pytest.approx(expected, rel=1e-4)
    assert num_products <= 50
    partial, fewer = gauss_newton_fall(objective, g, enough=expected / 4)
    assert expected / 4 <= partial <= expected
    assert fewer < num_products


@pytest.mark.parametrize("num_steps", [0, 3, 15, 30, 100])
def test_the_verdict_is_that_of_the_function_and_not_of_its_parameters(num_steps: int) -> None:
    model = train(mlp(), num_steps)
    objective = fm.Objective(model, F.cross_entropy, (X, Y))
    base, _, _ = check_minimum(objective, generator())
    symmetries = fm.find_symmetries(objective)
    for seed in range(3):
        moved = fm.Objective(fm.random_equivalent(model, symmetries, generator=generator(seed)), F.cross_entropy, (X, Y))
        check, _, _ = check_minimum(moved, generator())
        assert check.verdict == base.verdict
        assert check.expected_fall == pytest.approx(base.expected_fall, rel=1e-4)
        assert check.reference_loss == pytest.approx(base.reference_loss, rel=1e-9)


def test_a_training_passes_from_slope_to_minimum() -> None:
    for num_steps, expected in ((0, "slope"), (15, "slope"), (30, "slope"), (2000, "minimum")):
        assert verdict(fm.Objective(train(mlp(), num_steps), F.cross_entropy, (X, Y))) == expected


def test_interpolated_targets_are_a_minimum_whatever_rounding_is_left() -> None:
    model = mlp()
    targets = model(X).detach().float().double()
    assert verdict(fm.Objective(model, F.mse_loss, (X, targets))) == "minimum"


def test_all_zero_weights_on_unequal_classes_are_no_minimum() -> None:
    model = mlp()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert verdict(fm.Objective(model, F.cross_entropy, (X, Y))) == "slope"


@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0])
def test_a_constant_in_the_loss_changes_no_verdict(offset: float) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets) + offset

    targets = X[:, :3].sin()
    model = network(nn.Linear(6, 3))
    assert verdict(fm.Objective(model, loss, (X, targets))) == "slope"
    with torch.no_grad():  # the least-squares solution
        solution = torch.linalg.lstsq(torch.cat([X, torch.ones(60, 1, dtype=D64)], dim=1), targets).solution
        model[0].weight.copy_(solution[:6].T)
        model[0].bias.copy_(solution[6])
    assert verdict(fm.Objective(model, loss, (X, targets))) == "minimum"


def test_a_saddle_without_slope_is_one() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.zeros(1, dtype=D64)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.a * self.b * x

    assert verdict(fm.Objective(Product(), F.mse_loss, (X[:, :1], 2 * X[:, :1]))) == "saddle"


@pytest.mark.parametrize(
    ("loss", "model", "targets"),
    [
        (F.mse_loss, network(nn.Linear(6, 3)), X[:, :3]),
        (F.cross_entropy, network(nn.Linear(6, 3)), Y),
        (F.nll_loss, network(nn.Linear(6, 3), nn.LogSoftmax(dim=1)), Y),
    ],
)
def test_the_reference_is_the_loss_of_the_mean_output_or_of_less(
    loss: Callable[..., Tensor], model: nn.Module, targets: Tensor
) -> None:
    mean = model(X).mean(0).detach().expand(60, 3)
    tried = [share * mean for share in (0.0, 0.25, 0.5, 1.0)]
    truth = min(loss(c.log_softmax(1) if loss is F.nll_loss else c, targets) for c in tried)
    objective = fm.Objective(model, loss, [(X[:50], targets[:50]), (X[50:], targets[50:])])
    assert reference_loss(objective) == pytest.approx(float(truth), rel=1e-12)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3, dtype=D64)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"a": self.layer(x)}


def test_outputs_that_have_no_mean_have_no_reference() -> None:
    def loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        return (outputs["a"] - targets).square().mean()

    assert reference_loss(fm.Objective(Named(), loss, (X, X[:, :3]))) is None
