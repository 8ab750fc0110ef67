"""Whether a point is a minimum, in terms that do not change with the coordinates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import flatminima as fm
from flatminima.trust.point import check_minimum, constant_losses, fall_along, fall_below_tangent, gauss_newton_step
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
    step = gauss_newton_step(objective, g)
    assert step.is_all
    assert step.fall == pytest.approx(expected, rel=1e-4)
    assert step.fall == pytest.approx(float(-g @ step.steps[-1] - step.steps[-1] @ G @ step.steps[-1] / 2), rel=1e-9)
    assert step.num_products <= 50
    partial = gauss_newton_step(objective, g, enough=expected / 4)
    assert expected / 4 <= partial.fall <= expected
    assert partial.num_products < step.num_products


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


# A problem that no network can fit: inputs in pairs, with unequal targets.
PAIRS = (torch.cat([X, X]), torch.cat([Y, (Y + 1) % 3]))
BALANCED = torch.arange(60) % 3


def settled(*layers: nn.Module, l2: float = 0.0) -> nn.Sequential:
    """Train until little is left to gain, with a gradient that is small and not zero."""
    model = network(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=l2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2000)
    for _ in range(2000):
        optimizer.zero_grad()
        F.cross_entropy(model(PAIRS[0]), PAIRS[1]).backward()
        optimizer.step()
        schedule.step()
    return model


def hidden(activation: nn.Module, *, is_zero: bool) -> nn.Sequential:
    """Return a network whose last layer is zero, and with ``is_zero`` its first one too."""
    model = network(nn.Linear(6, 5), activation, nn.Linear(5, 3))
    with torch.no_grad():
        for p in model.parameters() if is_zero else model[2].parameters():
            p.zero_()
    return model


def shifted(model: nn.Sequential, seed: int) -> nn.Sequential:
    """Add one vector to every class row of the last layer: the softmax stays as it is."""
    last = model[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight.add_(torch.randn(last.weight.shape[1], generator=generator(seed), dtype=D64))
        last.bias.add_(0.3)
    return model


@pytest.mark.parametrize(("activation", "l2"), [(nn.ReLU(), 1e-3), (nn.Tanh(), 1e-3)], ids=["relu", "tanh"])
def test_a_settled_training_is_at_a_minimum_though_its_gradient_is_not_zero(activation: nn.Module, l2: float) -> None:
    model = settled(nn.Linear(6, 4), activation, nn.Linear(4, 3), l2=l2)
    objective = fm.Objective(model, F.cross_entropy, PAIRS, l2=l2)
    assert float(objective.gradient().norm()) > 1e-6
    assert verdict(objective) == "minimum"


def product(x: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    a, b = (torch.tensor(x, dtype=dtype, requires_grad=True) for _ in range(2))
    return a, b


@pytest.mark.parametrize("dtype", [torch.float32, D64])
def test_a_residual_gradient_makes_no_saddle_of_an_orbit_of_minima(dtype: torch.dtype) -> None:
    a, b = product((1 + 1e-6) ** 0.5, dtype)
    objective = fm.Objective.from_closure(lambda: (a * b - 1) ** 2 + 1, [a, b])
    check, _, _ = check_minimum(objective, generator())
    assert check.smallest_eigenvalue < -1e-6
    assert check.verdict == "minimum"


@pytest.mark.parametrize("dtype", [torch.float32, D64])
@pytest.mark.parametrize(("start", "offset"), [(0.0, 0.0), (0.0, 3.0), (1e-9, 3.0)])
def test_a_loss_that_falls_on_both_sides_of_a_ridge_has_a_saddle(dtype: torch.dtype, start: float, offset: float) -> None:
    w = torch.tensor([start, 0.0], dtype=dtype, requires_grad=True)
    signs = torch.tensor([1.0, -1.0], dtype=dtype)
    assert verdict(fm.Objective.from_closure(lambda: (signs * w * w).sum() + offset, [w])) == "saddle"


@pytest.mark.parametrize("dtype", [torch.float32, D64])
def test_dead_symmetric_networks_are_saddles_and_a_softmax_shift_does_not_change_that(dtype: torch.dtype) -> None:
    data = (X.to(dtype), BALANCED)
    assert verdict(fm.Objective(hidden(nn.Tanh(), is_zero=True).to(dtype), F.cross_entropy, data)) == "saddle"
    for seed in range(3):
        model = shifted(hidden(nn.Tanh(), is_zero=True), seed).to(dtype)
        assert verdict(fm.Objective(model, F.cross_entropy, data)) == "saddle"


@pytest.mark.parametrize("dtype", [torch.float32, D64])
def test_a_softmax_shift_does_not_hide_a_slope(dtype: torch.dtype) -> None:
    for seed in range(3):
        model = shifted(hidden(nn.ReLU(), is_zero=False), seed).to(dtype)
        assert verdict(fm.Objective(model, F.cross_entropy, (X.to(dtype), Y))) == "slope"


@pytest.mark.parametrize("dtype", [torch.float32, D64])
@pytest.mark.parametrize("is_zero", [False, True])
def test_constant_outputs_that_are_best_are_a_minimum(dtype: torch.dtype, is_zero: bool) -> None:
    data = (torch.cat([X[:20]] * 3).to(dtype), torch.arange(3).repeat_interleave(20))
    for model in (hidden(nn.Tanh(), is_zero=is_zero), shifted(hidden(nn.Tanh(), is_zero=is_zero), 5)):
        check, _, _ = check_minimum(fm.Objective(model.to(dtype), F.cross_entropy, data), generator())
        assert check.verdict == "minimum"
        assert check.expected_fall == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, D64])
@pytest.mark.parametrize(("unit", "expected"), [(1, "minimum"), (2, "saddle")])
def test_linear_networks_have_a_saddle_at_every_worse_subspace(dtype: torch.dtype, unit: int, expected: str) -> None:
    inputs = torch.linalg.qr(X - X.mean(0))[0] * 60**0.5
    strengths = (3.0, 2.0, 1.0)
    targets = inputs[:, :3] * torch.tensor(strengths, dtype=D64)
    model = network(nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        for row, place in enumerate((0, unit)):
            model[0].weight[row, place] = model[1].weight[place, row] = strengths[place] ** 0.5
    data = (inputs.to(dtype), targets.to(dtype))
    objective = fm.Objective(model.to(dtype), F.mse_loss, data)
    assert verdict(objective) == expected
    symmetries = fm.find_symmetries(objective)
    for seed in range(3):
        assert (
            verdict(fm.Objective(fm.random_equivalent(model, symmetries, generator=generator(seed)), F.mse_loss, data))
            == expected
        )


@pytest.mark.parametrize("dtype", [torch.float32, D64])
def test_it_cannot_be_told_of_absolute_errors(dtype: torch.dtype) -> None:
    model = network(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)).to(dtype)
    data = (X.to(dtype), X[:, :1].sin().to(dtype))
    assert verdict(fm.Objective(model, F.l1_loss, data)) == "unknown"
    w = torch.tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
    assert verdict(fm.Objective.from_closure(lambda: w.abs().sum(), [w])) == "unknown"
    exact = model(data[0]).detach()
    assert verdict(fm.Objective(model, F.l1_loss, (data[0], exact))) == "minimum"


def test_the_fall_below_the_tangent_is_that_of_the_double_well_and_none_where_it_is_convex() -> None:
    x = torch.tensor([0.0], dtype=D64, requires_grad=True)
    one = torch.ones(1, dtype=D64)
    well = fm.Objective.from_closure(lambda: (x**4 - x**2).sum(), [x])
    fall = fall_below_tangent(well, one, loss=0.0, slope=0.0, first=0.5**9 * 0.5**0.5)
    assert fall == pytest.approx(0.25, rel=1e-12)
    convex = fm.Objective.from_closure(lambda: (x.exp() + x).sum(), [x])
    assert fall_below_tangent(convex, one, loss=1.0, slope=2.0, first=1e-3) < 1e-15


def test_the_fall_along_a_step_is_that_of_the_loss() -> None:
    x = torch.tensor([1.0], dtype=D64, requires_grad=True)
    step = torch.tensor([-4.0], dtype=D64)
    kink = fm.Objective.from_closure(lambda: x.abs().sum(), [x])
    assert fall_along(kink, [step], loss=1.0) == pytest.approx(1.0)
    assert fall_along(kink, [-step], loss=1.0) == 0.0


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
    assert min(constant_losses(objective)) == pytest.approx(float(truth), rel=1e-12)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3, dtype=D64)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"a": self.layer(x)}


def test_outputs_that_have_no_mean_have_no_reference() -> None:
    def loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        return (outputs["a"] - targets).square().mean()

    assert constant_losses(fm.Objective(Named(), loss, (X, X[:, :3]))) == []
