"""What find_symmetries does not move along is named: the null space of the Jacobian holds no symmetry without a note."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima import Objective, measures
from flatminima.symmetries import centre_classes, check_equivalent, find_symmetries
from tests.symmetries.networks import Residual, mlp, randomised

X = torch.randn(9, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(9) % 3


class Net(nn.Module):
    """Modules and parameters by name, and a forward function of them and the input."""

    def __init__(self, forward: Callable[[Net, Tensor], Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.rule = forward
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self, x)


def linear(a: int, b: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(a, b, bias=bias)


def gain(*shape: int) -> Net:
    return Net(lambda s, x: s.o(F.relu(s.i(x)) * s.k), i=linear(4, 5), o=linear(5, 3), k=torch.ones(shape))


def twice(bias: bool) -> Net:
    return Net(lambda s, x: s.o(F.relu(s.a(F.relu(s.a(x))))), a=linear(4, 4, bias), o=linear(4, 3, bias))


def norm(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(linear(4, 6), layer, nn.ReLU(), linear(6, 3))


def weight_norm() -> nn.Module:
    model = mlp(4, 5, 3)
    nn.utils.parametrizations.weight_norm(model[0])
    return model


def rms(s: Net, x: Tensor) -> Tensor:
    h = s.i(x)
    return s.o(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-20))


#: Name -> (network of 4 inputs, words that its notes must hold, all of them together).
UNCOVERED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "gain (1,)": (lambda: gain(1), ("k multiplies all channels",)),
    "gain ()": (gain, ("k multiplies all channels",)),
    "gain of inputs": (lambda: Net(lambda s, x: s.o(s.k * x), k=torch.ones(1), o=linear(4, 3)), ("k multiplies all", "o.weight")),
    "a layer twice": (lambda: twice(False), ("a.weight is used more than once",)),
    "LayerNorm": (lambda: norm(nn.LayerNorm(6, eps=0.0)), ("layer_norm is unchanged", "what feeds it (0)", "one vector")),
    "GroupNorm": (lambda: norm(nn.GroupNorm(2, 6, eps=0.0)), ("group_norm is unchanged", "what feeds it (0)")),
    "RMSNorm": (lambda: norm(nn.RMSNorm(6, eps=0.0)), ("rms_norm is unchanged", "what feeds it (0)")),
    "normalize": (lambda: Net(lambda s, x: s.o(F.normalize(s.i(x))), i=linear(4, 5), o=linear(5, 3)), ("i.weight, i.bias",)),
    "RMSNorm by hand": (lambda: Net(rms, i=linear(4, 5), o=linear(5, 3)), ("i.weight, i.bias",)),
    "weight norm": (weight_norm, ("0.parametrizations.weight.original1",)),
    "linear chain": (lambda: nn.Sequential(linear(4, 5), linear(5, 3)), ("0, 1: no nonlinearity lies between",)),
    "BatchNorm": (lambda: norm(nn.BatchNorm1d(6)), ("shifts of 0.bias",)),
    "parallel layers": (
        lambda: Net(lambda s, x: s.o(F.relu(s.a(x) + s.b(x))), a=linear(4, 5), b=linear(4, 5), o=linear(5, 3)),
        ("a and b read the same", "shifts of a.bias, b.bias"),
    ),
    "residual": (lambda: Net(lambda s, x: s.r(x[:, :3]), r=Residual()), ("shifts of", "r.down2.bias")),
    "residual without a nonlinearity": (
        lambda: Net(lambda s, x: s.o(x + s.b(F.relu(s.a(x)))), a=linear(4, 5), b=linear(5, 4), o=linear(4, 3)),
        ("shifts of b.bias, o.bias",),
    ),
    "squares": (lambda: Net(lambda s, x: s.o(s.i(x) ** 2), i=linear(4, 5), o=linear(5, 3)), ("i.weight, i.bias, o.weight",)),
    "gates": (
        lambda: Net(lambda s, x: s.o(F.silu(s.a(x)) * s.b(x)), a=linear(4, 5), b=linear(4, 5), o=linear(5, 3)),
        ("b.weight, b.bias, o.weight",),
    ),
}
COVERED: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(4, 5, 6, 3),
    "mlp without biases": lambda: mlp(4, 5, 6, 3, bias=False),
    "leaky": lambda: mlp(4, 5, 3, activation=nn.LeakyReLU),
    "tanh": lambda: mlp(4, 5, 3, activation=nn.Tanh),
    "a layer twice, with biases": lambda: twice(True),
    "gain of each unit": lambda: gain(5),
}


def null_dimension(model: nn.Module) -> int:
    """The oracle: number of diagonal D with J(θ) D θ = 0 for all inputs, at a generic θ (of a few, so that no unit is dead)."""
    generator = torch.Generator().manual_seed(5)
    inputs = 2 * torch.randn(150, 4, generator=generator, dtype=torch.float64)
    least = []
    for _ in range(4):
        named = {
            name: 0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64) for name, p in model.named_parameters()
        }
        jacobians = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (inputs,)).reshape(-1))(named)
        J = torch.cat([jacobians[name].reshape(len(inputs) * 3, -1) * p.reshape(-1) for name, p in named.items()], dim=1)
        values = torch.linalg.svdvals(J / J.norm(dim=0).clamp(min=1e-12))
        least.append(J.shape[1] - int((values > 1e-9 * values[0]).sum()))
    return min(least)


def found_dimension(model: nn.Module) -> int:
    return sum(s.dimension for s in find_symmetries(model, X) if s.kind == "node")


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch batches the derivative of weight norm slowly
@pytest.mark.parametrize("name", UNCOVERED)
def test_where_the_null_space_is_larger_than_the_symmetries_found_a_note_names_what_is_free(name: str) -> None:
    make, words = UNCOVERED[name]
    torch.manual_seed(0)
    model = randomised(make())
    assert null_dimension(model) > found_dimension(model)
    notes = find_symmetries(model, X).notes
    for word in words:
        assert any(word in note for note in notes), (word, notes)
    assert any("size of the parameters depend on" in note for note in notes)


@pytest.mark.parametrize("name", COVERED)
def test_where_the_symmetries_found_are_the_null_space_no_note_says_that_more_is_free(name: str) -> None:
    torch.manual_seed(0)
    model = randomised(COVERED[name]())
    assert null_dimension(model) == found_dimension(model)
    assert not any("size of the parameters depend on" in note for note in find_symmetries(model, X).notes)


def test_tanh_before_a_normalisation_leaves_no_scale_free() -> None:
    model = randomised(nn.Sequential(linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.ReLU(), linear(6, 3)))
    assert not any("layer_norm" in note for note in find_symmetries(model, X).notes)


def test_more_parameters_than_are_tried_are_said_not_to_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from flatminima.symmetries import whole_tensors

    monkeypatch.setattr(whole_tensors, "_MOST_TENSORS", 3)
    assert any("were not looked for numerically" in note for note in find_symmetries(mlp(4, 5, 3), X).notes)
    monkeypatch.undo()
    monkeypatch.setattr(whole_tensors, "_MOST_WORK", 3)
    assert any("the network is too large for it" in note for note in find_symmetries(mlp(4, 5, 3), X).notes)


def test_layers_of_next_to_no_effect_in_a_deep_network_are_not_said_to_be_free() -> None:
    torch.manual_seed(0)
    layers = [module for _ in range(12) for module in (nn.Linear(8, 8), nn.ReLU())]
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), *layers, nn.Linear(8, 3))
    assert find_symmetries(model, X).notes == ()


def test_an_unused_parameter_is_named() -> None:
    model = Net(lambda s, x: s.i(x), i=linear(4, 3), unused=torch.ones(2))
    assert any("rescaling unused leaves the outputs as they are" in note for note in find_symmetries(model, X).notes)


# --- softmax losses that are not torch's own --------------------------------------------------------------------------------


class Smoothed(nn.CrossEntropyLoss):
    """A subclass, which could add anything."""

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return 0.9 * super().forward(outputs, target) - 0.1 * outputs.log_softmax(1).mean()


SOFTMAX_LOSSES = {
    "lambda": lambda o, t: F.cross_entropy(o, t),
    "subclass": Smoothed(),
    "margin": lambda o, t: (o.logsumexp(1) - o.gather(1, t[:, None])[:, 0]).mean(),
}


@pytest.mark.parametrize("name", SOFTMAX_LOSSES)
def test_a_custom_softmax_loss_is_recognised_by_trying_and_its_shift_is_moved_along_and_divided_out(name: str) -> None:
    objective = Objective(mlp(4, 5, 3), SOFTMAX_LOSSES[name], [(X[:5], Y[:5]), (X[5:], Y[5:])])
    (shift,) = find_symmetries(objective).of_kind("softmax shift")
    moved = objective.with_model(shift.random(torch.Generator().manual_seed(0)).apply(objective.model))
    torch.testing.assert_close(moved.value(), objective.value())
    measure = measures.AdaptiveAverageSharpness(num_pairs=4)
    values = [float(measure(o, generator=torch.Generator().manual_seed(0))) for o in (objective, moved)]
    assert values[0] == pytest.approx(values[1], rel=1e-9)
    a, b = (centre_classes(o).model for o in (objective, moved))
    check_equivalent(a, b, X)
    assert all(torch.allclose(p, q, atol=1e-12) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_a_custom_loss_that_sees_the_shift_is_no_softmax_loss() -> None:
    losses = (lambda o, t: F.cross_entropy(o, t) + 1e-6 * o.square().mean(), lambda o, t: (o - 1).square().mean())
    for loss in losses:
        objective = Objective(mlp(4, 5, 3), loss, [(X, Y)])
        found = find_symmetries(objective)
        assert "softmax shift" not in found.kinds()
        assert found.notes == ()
        assert centre_classes(objective) is objective


def test_where_a_custom_loss_cannot_be_tried_a_note_says_so() -> None:
    tokens = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.arange(18).reshape(6, 3) % 3
    objective = Objective(mlp(4, 5, 3), lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()), [(tokens, labels)])
    assert any("shape (6, 3, 3): not looked for" in note for note in find_symmetries(objective).notes)
    found = find_symmetries(mlp(4, 5, 3), X, loss=lambda o, t: F.cross_entropy(o, t))
    assert any("without an objective it cannot be tried" in note for note in found.notes)


def test_a_model_that_ends_in_a_softmax_can_be_shifted_under_any_loss() -> None:
    model = nn.Sequential(*mlp(4, 5, 3), nn.Softmax(1))
    (shift,) = find_symmetries(model, X).of_kind("softmax shift")
    check_equivalent(model, shift.random(torch.Generator().manual_seed(0)).apply(model), X)
    wrong_axis = nn.Sequential(*mlp(4, 5, 3), nn.Softmax(0))
    assert "softmax shift" not in find_symmetries(wrong_axis, X).kinds()
