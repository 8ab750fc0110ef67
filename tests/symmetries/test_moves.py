"""Moves: same function, exact inverse, composition, and the laws of gradients and Hessians."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.functional import hessian

from flatminima._errors import NotEquivalent
from flatminima.params import ParameterSpace
from flatminima.symmetries import (
    Composition,
    Permutation,
    Rescaling,
    SoftmaxShift,
    check_equivalent,
    find_symmetries,
    random_equivalent,
)
from tests.symmetries.networks import NETWORKS, build, mlp, randomised, rescaling, vector

X = torch.randn(9, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
FOUND = {name: find_symmetries(*build(name), loss=nn.CrossEntropyLoss()) for name in ("mlp", "cnn", "separable cnn", "residual")}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_equal_after_a_move_of_every_kind(name: str) -> None:
    model, inputs = build(name)
    for symmetry in find_symmetries(model, inputs, loss=nn.CrossEntropyLoss()):
        moved = symmetry.random(generator(), scale=1.0).apply(model)
        assert (vector(moved) - vector(model)).abs().max() > 1e-3
        check_equivalent(model, moved, inputs, shift_invariant=symmetry.kind == "softmax shift")


@settings(max_examples=20, deadline=None)
@given(name=st.sampled_from(sorted(FOUND)), seed=st.integers(0, 10**6), scale=st.floats(0, 2))
def test_random_equivalents_are_equivalent_from_anywhere_on_the_orbit(name: str, seed: int, scale: float) -> None:
    model, inputs = build(name)
    source = generator(seed)
    once = random_equivalent(model, FOUND[name], generator=source, scale=scale)
    twice = random_equivalent(once, FOUND[name], generator=source, scale=scale)
    check_equivalent(model, once, inputs, shift_invariant=True)
    check_equivalent(model, twice, inputs, shift_invariant=True, rtol=1e-9)


@pytest.mark.parametrize("name", FOUND)
def test_inverse_undoes_every_move(name: str) -> None:
    model, _ = build(name)
    for symmetry in FOUND[name]:
        move = symmetry.random(generator())
        back = move.inverse().apply(move.apply(model))
        tolerance = 0.0 if symmetry.kind == "permutation" else 1e-13
        torch.testing.assert_close(vector(back), vector(model), rtol=tolerance, atol=tolerance)


def test_composition_is_one_move_after_the_other_and_has_an_inverse() -> None:
    model, _ = build("cnn")
    moves = [s.random(generator()) for s in FOUND["cnn"]]
    composed = moves[0].then(moves[1]).then(moves[2]).then(moves[3])
    stepwise = model
    for move in moves[:4]:
        stepwise = move.apply(stepwise)
    torch.testing.assert_close(vector(composed.apply(model)), vector(stepwise), rtol=1e-14, atol=1e-14)
    back = composed.inverse().apply(composed.apply(model))
    torch.testing.assert_close(vector(back), vector(model), rtol=1e-12, atol=1e-12)
    assert torch.equal(vector(Composition().apply(model)), vector(model))


def test_a_state_dict_moves_like_the_model_and_is_not_changed() -> None:
    model, _ = build("cnn")
    for symmetry in FOUND["cnn"]:
        move = symmetry.random(generator())
        state = model.state_dict()
        before = {k: v.clone() for k, v in state.items()}
        moved, expected = move.apply_state(state), move.apply(model).state_dict()
        assert list(moved) == list(state)
        assert all(torch.equal(moved[k], expected[k]) for k in expected)
        assert all(torch.equal(before[k], state[k]) for k in before)


def test_a_float32_model_keeps_its_dtype_and_its_function_to_rounding() -> None:
    model = mlp(4, 5, 6, 3).float()
    moved = random_equivalent(model, find_symmetries(model, X), generator=generator())
    assert {p.dtype for p in moved.parameters()} == {torch.float32}
    assert 1e-12 < check_equivalent(model, moved, X, rtol=1e-5) < 1e-5


def test_the_same_generator_gives_the_same_move() -> None:
    model, _ = build("cnn")
    a, b = (random_equivalent(model, FOUND["cnn"], generator=generator(3)) for _ in range(2))
    assert torch.equal(vector(a), vector(b))
    rng = torch.get_rng_state()
    random_equivalent(model, FOUND["cnn"], generator=generator(3))
    assert torch.equal(rng, torch.get_rng_state())


def test_scale_is_the_standard_deviation_of_the_log_factors() -> None:
    wide = mlp(2, 4000, 1)
    node = rescaling(wide, X[:, :2], "node")
    move = node.random(generator(), scale=0.3)
    assert float(move.log_scales.std()) == pytest.approx(0.3, rel=0.05)
    assert torch.equal(node.random(generator(), scale=0.0).log_scales, torch.zeros(4000, dtype=torch.float64))


# --- rescaling ------------------------------------------------------------------------------------------------------------


def test_layer_rescaling_has_product_one_and_cumulative_biases() -> None:
    model = mlp(4, 5, 6, 3)
    layer = rescaling(model, X, "layer")
    space = ParameterSpace.of(model)
    factors = space.unflatten(layer.random(generator()).factors(space))
    assert all(f.unique().numel() == 1 for f in factors.values())
    alphas = [float(factors[f"{i}.weight"].flatten()[0]) for i in (0, 2, 4)]
    biases = [float(factors[f"{i}.bias"][0]) for i in (0, 2, 4)]
    assert alphas[0] * alphas[1] * alphas[2] == pytest.approx(1, rel=1e-14)
    assert biases == pytest.approx([alphas[0], alphas[0] * alphas[1], 1], rel=1e-14)


def test_the_naive_bias_rule_changes_the_function() -> None:
    model = mlp(4, 5, 6, 3)
    alphas = {0: 2.0, 2: 3.0, 4: 1 / 6}
    naive, right = copy.deepcopy(model), copy.deepcopy(model)
    cumulative = 1.0
    with torch.no_grad():
        for index, alpha in alphas.items():
            cumulative *= alpha
            naive[index].weight.mul_(alpha)
            naive[index].bias.mul_(alpha)
            right[index].weight.mul_(alpha)
            right[index].bias.mul_(cumulative)
    check_equivalent(model, right, X)
    with pytest.raises(NotEquivalent, match="must have the same outputs"):
        check_equivalent(model, naive, X)


@pytest.mark.parametrize("kind", ["layer", "node"])
def test_gradient_and_hessian_transform_by_the_factors(kind: str) -> None:
    model = mlp(3, 4, 3, 2)
    x, y = X[:, :3], torch.arange(9) % 2
    space = ParameterSpace.of(model)

    def loss(theta: Tensor) -> Tensor:
        outputs = torch.func.functional_call(model, space.unflatten(theta), (x,))
        return nn.functional.cross_entropy(outputs, y)

    move = rescaling(model, x, kind).random(generator(), scale=0.7)
    theta, d = space.flatten(dict(model.named_parameters())), move.factors(space)
    torch.testing.assert_close(space.flatten(dict(move.apply(model).named_parameters())), d * theta, rtol=1e-14, atol=0)
    g, g_moved = torch.func.grad(loss)(theta), torch.func.grad(loss)(d * theta)
    H, H_moved = hessian(loss, theta), hessian(loss, d * theta)
    torch.testing.assert_close(g_moved, g / d, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(H_moved, H / torch.outer(d, d), rtol=1e-9, atol=1e-11)


def test_node_rescaling_contains_layer_rescaling() -> None:
    model = mlp(4, 5, 6, 3)
    layer, node, space = rescaling(model, X, "layer"), rescaling(model, X, "node"), ParameterSpace.of(model)
    u = torch.tensor([0.3, -1.2], dtype=torch.float64)
    same = node.move(torch.cat([u[:1].expand(5), u[1:].expand(6)]))
    torch.testing.assert_close(layer.move(u).factors(space), same.factors(space))


def test_norm_scale_moves_statistics_and_nothing_after_them() -> None:
    model, _ = build("cnn")
    (norm,) = FOUND["cnn"].of_kind("norm-scale")
    assert isinstance(norm, Rescaling)
    u = torch.zeros(10, dtype=torch.float64)
    u[1] = 0.5
    moved = norm.move(u).apply(model)
    c = torch.tensor(0.5, dtype=torch.float64).exp()
    old, new = model.state_dict(), moved.state_dict()
    torch.testing.assert_close(new["0.weight"][1], c * old["0.weight"][1])
    torch.testing.assert_close(new["0.bias"][1], c * old["0.bias"][1])
    torch.testing.assert_close(new["1.running_mean"][1], c * old["1.running_mean"][1])
    torch.testing.assert_close(new["1.running_var"][1], c**2 * (old["1.running_var"][1] + 1e-5) - 1e-5)
    touched = {"0.weight", "0.bias", "1.running_mean", "1.running_var"}
    assert {k for k in old if not torch.equal(old[k], new[k])} == touched
    assert set(norm.buffers) == {"1.running_mean", "1.running_var", "5.running_mean", "5.running_var"}


def test_norm_scale_refuses_a_negative_variance_and_random_moves_avoid_it() -> None:
    model = randomised(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, eps=0.5), nn.ReLU(), nn.Linear(5, 3)))
    norm = rescaling(model, X, "norm-scale")
    with pytest.raises(ValueError, match="must keep the variances nonnegative"):
        norm.move(torch.full((5,), -3.0)).apply(model)
    for seed in range(20):
        moved = random_equivalent(model, norm, generator=generator(seed), scale=3.0)
        assert bool((moved[1].running_var >= 0).all())
        check_equivalent(model, moved, X)


# --- permutation ----------------------------------------------------------------------------------------------------------


def test_permutation_is_an_index_and_carries_everything_of_a_channel() -> None:
    model, _ = build("cnn")
    (permutation,) = FOUND["cnn"].of_kind("permutation")
    assert isinstance(permutation, Permutation)
    orders = [torch.arange(len(cell)) for cell in permutation.cells]
    first = next(i for i, label in enumerate(permutation.labels) if label == "0")
    orders[first] = torch.tensor([2, 0, 1, 3])
    move = permutation.move(orders)
    old, new = model.state_dict(), move.apply(model).state_dict()
    for name in ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"):
        torch.testing.assert_close(new[name], old[name][orders[first]], rtol=0, atol=0)
    torch.testing.assert_close(new["4.weight"], old["4.weight"][:, orders[first]], rtol=0, atol=0)
    space = ParameterSpace.of(model)
    theta = space.flatten(dict(model.named_parameters()))
    moved_theta = space.flatten(dict(move.apply(model).named_parameters()))
    assert torch.equal(theta[move.index(space)], moved_theta)
    with pytest.raises(ValueError, match="`factors` must be asked of a move that multiplies"):
        move.factors(space)


def test_permutation_of_flattened_channels_keeps_their_positions() -> None:
    model, inputs = build("cnn")
    (permutation,) = FOUND["cnn"].of_kind("permutation")
    assert isinstance(permutation, Permutation)
    orders = [torch.arange(len(cell)) for cell in permutation.cells]
    second = next(i for i, label in enumerate(permutation.labels) if label == "4")
    orders[second] = torch.tensor([1, 0, 2, 3, 4, 5])
    moved = permutation.move(orders).apply(model)
    columns = [4, 5, 6, 7, 0, 1, 2, 3, *range(8, 24)]
    assert torch.equal(moved[10].weight, model[10].weight[:, columns])
    check_equivalent(model, moved, inputs)


def test_permutation_arguments_are_checked() -> None:
    (permutation,) = FOUND["mlp"].of_kind("permutation")
    assert isinstance(permutation, Permutation)
    with pytest.raises(ValueError, match="one permutation for each of 2 cells"):
        permutation.move([])
    with pytest.raises(ValueError, match="must hold permutations"):
        permutation.move([torch.zeros(5, dtype=torch.long), torch.arange(6)])


# --- softmax shift --------------------------------------------------------------------------------------------------------


def test_softmax_shift_moves_each_examples_logits_by_one_number() -> None:
    model = mlp(4, 5, 3)
    (shift,) = find_symmetries(model, X, loss=nn.CrossEntropyLoss()).of_kind("softmax shift")
    assert isinstance(shift, SoftmaxShift)
    moved = shift.random(generator()).apply(model)
    gap = (moved(X) - model(X)).detach()
    torch.testing.assert_close(gap, gap[:, :1].expand(-1, 3))
    assert float(gap.abs().min()) > 0
    check_equivalent(model, moved, X, shift_invariant=True)
    with pytest.raises(NotEquivalent):
        check_equivalent(model, moved, X)


# --- check_equivalent and bad arguments -----------------------------------------------------------------------------------


def test_check_equivalent_raises_on_a_wrong_move_and_on_nan() -> None:
    model = mlp(4, 5, 3)
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong[0].weight[0, 0] += 1e-6
    with pytest.raises(NotEquivalent):
        check_equivalent(model, wrong, X)
    with torch.no_grad():
        wrong[0].weight.fill_(float("nan"))
    with pytest.raises(NotEquivalent, match="nan"):
        check_equivalent(model, wrong, X)
    with pytest.raises(NotEquivalent, match="inf"):
        check_equivalent(model, mlp(4, 5, 2), X)


def test_check_equivalent_refuses_inputs_without_examples() -> None:
    with pytest.raises(ValueError, match="`inputs` must hold at least one example"):
        check_equivalent(mlp(2, 3, seed=1), mlp(2, 3, seed=2), torch.ones(0, 2))
    with pytest.raises(ValueError, match="`example_inputs` must hold at least one example"):
        find_symmetries(mlp(2, 3), torch.ones(0, 2))


@pytest.mark.parametrize("shift_invariant", [False, True])
@pytest.mark.parametrize("classes", [3, 5])
def test_one_large_class_does_not_hide_another_that_is_wrong(classes: int, shift_invariant: bool) -> None:
    model = mlp(4, 5, classes)
    with torch.no_grad():
        model[2].weight[0] *= 1e12
    for move in (s.random(generator()) for s in find_symmetries(model, X)):
        check_equivalent(model, move.apply(model), X, shift_invariant=shift_invariant)  # an honest move passes
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong[2].bias[1] += 1e-6
    with pytest.raises(NotEquivalent):
        check_equivalent(model, wrong, X, shift_invariant=shift_invariant)


def test_an_output_that_cancels_does_not_make_an_honest_move_fail() -> None:
    model = mlp(4, 50, 3)
    with torch.no_grad():
        model[2].bias[1] -= model(X[:1])[0, 1]  # one entry is rounding alone, and it is the only example
    assert float(model(X[:1]).detach()[0, 1].abs()) < 1e-14
    for seed in range(5):
        for symmetry in find_symmetries(model, X[:1]):
            check_equivalent(model, symmetry.random(generator(seed)).apply(model), X[:1])


def test_check_equivalent_compares_eval_mode_and_leaves_modes_alone() -> None:
    model, inputs = build("cnn")
    train = copy.deepcopy(model).train()
    assert check_equivalent(train, model, inputs) == 0.0
    assert train.training


def test_a_move_of_another_network_is_refused() -> None:
    move = FOUND["mlp"][0].random(generator())
    with pytest.raises(ValueError, match="`model` must be the network in which the symmetry was found"):
        move.apply(mlp(4, 5, 7, 3))
    with pytest.raises(ValueError, match="no such tensor"):
        move.apply(nn.Linear(4, 3))


def test_wrong_arguments_are_named() -> None:
    (node,) = FOUND["mlp"].of_kind("node")
    assert isinstance(node, Rescaling)
    with pytest.raises(ValueError, match="`log_scales` must have shape"):
        node.move(torch.zeros(3))
    with pytest.raises(ValueError, match="`log_scales` must be finite"):
        node.move(torch.full((11,), float("inf")))
    with pytest.raises(ValueError, match="`scale` must be"):
        node.random(scale=-1.0)
    with pytest.raises(TypeError, match="`generator` must be"):
        node.random(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`symmetries` must hold"):
        random_equivalent(mlp(4, 5, 3), ["node"])  # type: ignore[list-item]
