"""The minimum over an orbit: closed forms, certificate, invariance, dead units."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flatminima.symmetries import Rescaling, find_symmetries, minimize_over_rescalings
from flatminima.symmetries.balance import balance
from tests.symmetries.networks import build, mlp, rescaling

X = torch.randn(9, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
MLP = mlp(4, 5, 6, 3)
NODE, LAYER = rescaling(MLP, X, "node"), rescaling(MLP, X, "layer")


def squares(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().square() for name, p in model.named_parameters()}


def random_weights(symmetry: Rescaling, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: symmetry.layout.shapes[name] for name in symmetry.roles}
    return {name: torch.rand(s, generator=generator, dtype=torch.float64) ** 4 + 1e-8 for name, s in shapes.items()}


def objective(symmetry: Rescaling, weights: dict[str, Tensor], u: Tensor, sign: int) -> Tensor:
    """Naive transcription: every entry times the square of its factor."""
    move = symmetry.move(u)
    total = torch.zeros((), dtype=torch.float64)
    for name, c in weights.items():
        factor = move.apply_state({name: torch.ones_like(c)})[name]
        total = total + (c * factor ** (2 * sign)).sum()
    return total


@pytest.mark.parametrize("depth", [2, 3, 6])
@pytest.mark.parametrize("sign", [1, -1])
def test_layer_minimum_without_biases_is_the_geometric_mean_of_the_traces(depth: int, sign: int) -> None:
    model = mlp(*([3] + [4] * (depth - 1) + [2]), bias=False)
    layer = rescaling(model, X[:, :3], "layer")
    weights = random_weights(layer, depth)
    expected = depth * math.prod(float(c.sum()) for c in weights.values()) ** (1 / depth)
    found = minimize_over_rescalings(layer, weights, sign=sign)
    assert found.value == pytest.approx(expected, rel=1e-13)
    assert found.attained == pytest.approx(expected, rel=1e-13)
    assert found.converged
    assert found.dead_units == ()


@pytest.mark.parametrize("sign", [1, -1])
def test_one_unit_has_the_closed_form_of_the_square_root(sign: int) -> None:
    model = mlp(1, 1, 1)
    node = rescaling(model, X[:, :1], "node")
    values = {"0.weight": 3.0, "0.bias": 5.0, "2.weight": 2.0, "2.bias": 7.0}
    weights = {name: torch.full(node.layout.shapes[name], value, dtype=torch.float64) for name, value in values.items()}
    found = minimize_over_rescalings(node, weights, sign=sign)
    assert found.value == pytest.approx(2 * math.sqrt(8 * 2) + 7, rel=1e-14)
    assert float(found.log_scales[0]) == pytest.approx(sign * 0.25 * math.log(2 / 8), rel=1e-13)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), sign=st.sampled_from([1, -1]), kind=st.sampled_from(["layer", "node"]))
def test_minimum_is_a_stationary_point_below_every_other_point_and_reproduced_naively(seed: int, sign: int, kind: str) -> None:
    symmetry = NODE if kind == "node" else LAYER
    weights = random_weights(symmetry, seed)
    found = minimize_over_rescalings(symmetry, weights, sign=sign)
    assert found.converged
    assert found.gradient <= 1e-12
    assert float(objective(symmetry, weights, found.log_scales, sign)) == pytest.approx(found.value, rel=1e-12)
    generator = torch.Generator().manual_seed(seed)
    for scale in (1e-3, 0.3, 3.0):
        step = scale * torch.randn(symmetry.dimension, generator=generator, dtype=torch.float64)
        assert float(objective(symmetry, weights, found.log_scales + step, sign)) > found.value


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.floats(0, 4), kind=st.sampled_from(["layer", "node"]))
def test_minimum_is_the_same_from_every_point_of_the_orbit(seed: int, scale: float, kind: str) -> None:
    symmetry = NODE if kind == "node" else LAYER
    moved = symmetry.random(torch.Generator().manual_seed(seed), scale).apply(MLP)
    here, there = (minimize_over_rescalings(symmetry, squares(m), sign=1) for m in (MLP, moved))
    assert there.value == pytest.approx(here.value, rel=1e-11)


def test_biases_enter_as_the_symmetry_moves_them_not_with_their_layer() -> None:
    weights = random_weights(LAYER, 3)
    found = minimize_over_rescalings(LAYER, weights, sign=-1)
    tr = {name: float(c.sum()) for name, c in weights.items()}
    a, b = found.log_scales.tolist()  # cumulative log-scales of the two hidden layers
    expected = (tr["0.weight"] + tr["0.bias"]) * math.exp(-2 * a) + tr["2.weight"] * math.exp(2 * (a - b))
    expected += tr["2.bias"] * math.exp(-2 * b) + tr["4.weight"] * math.exp(2 * b)
    assert found.value == pytest.approx(expected, rel=1e-12)
    lumped = 3 * math.prod(tr[f"{i}.weight"] + tr.get(f"{i}.bias", 0.0) for i in (0, 2, 4)) ** (1 / 3)
    assert found.value != pytest.approx(lumped, rel=1e-3)


def test_node_minimum_is_at_most_the_layer_minimum() -> None:
    for seed in range(5):
        weights = random_weights(NODE, seed)
        node, layer = (minimize_over_rescalings(s, weights, sign=-1).value for s in (NODE, LAYER))
        assert node < layer <= sum(float(c.sum()) for c in weights.values())


def test_parameters_that_do_not_scale_count_as_they_are_and_missing_ones_not_at_all() -> None:
    weights = random_weights(NODE, 0)
    base = minimize_over_rescalings(NODE, weights, sign=-1).value
    with_constant = minimize_over_rescalings(NODE, {**weights, "4.bias": torch.ones(3), "other": torch.ones(2)}, sign=-1)
    assert with_constant.value == pytest.approx(base + 5, rel=1e-13)
    assert minimize_over_rescalings(NODE, {}, sign=-1).value == 0.0


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("depth", "spread"), [(30, 1.0), (60, 6.0)])
def test_deep_chains_converge(depth: int, spread: float, sign: int) -> None:
    rng = np.random.default_rng(0)
    units = np.arange(depth)
    weights = np.exp(spread * rng.standard_normal(depth + 1))
    rows, columns = np.append(units, -1), np.append(-1, units)
    if sign == -1:
        rows, columns = columns, rows
    found = balance(rows, columns, weights, units, 1e-12, 1000)
    assert found.gradient <= 1e-12
    assert found.sweeps < 60
    expected = (depth + 1) * math.exp(float(np.log(weights).mean()))
    assert found.infimum == pytest.approx(expected, rel=1e-12)


def test_a_residual_stream_is_balanced_too() -> None:
    model, inputs = build("residual")
    node = rescaling(model, inputs, "node")
    weights = squares(model)
    found = minimize_over_rescalings(node, weights, sign=1)
    assert found.converged
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-3, 1.0):
        step = scale * torch.randn(node.dimension, generator=generator, dtype=torch.float64)
        assert float(objective(node, weights, found.log_scales + step, 1)) > found.value


def test_units_of_one_layer_that_read_each_other_are_balanced() -> None:
    rng = np.random.default_rng(1)
    i, j = np.meshgrid(np.arange(8), np.arange(8), indexing="ij")
    rows = np.concatenate([i.ravel(), np.arange(8), np.full(8, -1)])
    columns = np.concatenate([j.ravel(), np.full(8, -1), np.arange(8)])
    weights = np.exp(2 * rng.standard_normal(len(rows)))
    found = balance(rows, columns, weights, np.zeros(8, dtype=np.int64), 1e-12, 1000)
    assert found.gradient <= 1e-12


def test_dead_units_stay_and_the_infimum_is_still_invariant() -> None:
    model = mlp(4, 5, 6, 3)
    with torch.no_grad():
        model[2].weight[:, 1] = 0.0  # nothing reads unit 1 of the first layer
        model[2].weight[4] = 0.0  # nothing comes into unit 4 of the second
        model[2].bias[4] = 0.0
    found = minimize_over_rescalings(NODE, squares(model), sign=1)
    assert found.dead_units == ("0[1]", "2[4]")
    assert found.converged
    assert float(found.log_scales[1]) == float(found.log_scales[5 + 4]) == 0.0
    assert found.attained > found.value
    moved = NODE.random(torch.Generator().manual_seed(0), 1.0).apply(model)
    there = minimize_over_rescalings(NODE, squares(moved), sign=1)
    assert there.value == pytest.approx(found.value, rel=1e-11)
    assert there.dead_units == found.dead_units


def test_units_without_any_weight_count_as_nothing() -> None:
    weights = random_weights(NODE, 0)
    for name, index in (("0.weight", (2,)), ("0.bias", (2,)), ("2.weight", (slice(None), 2))):
        weights[name][index] = 0.0
    found = minimize_over_rescalings(NODE, weights, sign=-1)
    assert found.dead_units == ("0[2]",)
    assert found.attained == pytest.approx(found.value, rel=1e-13)


def test_a_million_weights_take_less_than_seconds() -> None:
    model = mlp(784, 700, 700, 10)
    node = rescaling(model, torch.randn(2, 784, dtype=torch.float64), "node")
    weights = random_weights(node, 0)
    start = time.perf_counter()
    found = minimize_over_rescalings(node, weights, sign=-1)
    assert found.converged
    assert time.perf_counter() - start < 5


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="`sign` must be"):
        minimize_over_rescalings(NODE, {}, sign=2)
    with pytest.raises(ValueError, match="`weights` must be nonnegative"):
        minimize_over_rescalings(NODE, {"0.bias": -torch.ones(5)}, sign=1)
    with pytest.raises(ValueError, match="must have shape"):
        minimize_over_rescalings(NODE, {"0.bias": torch.ones(4)}, sign=1)
    (permutation,) = find_symmetries(MLP, X).of_kind("permutation")
    with pytest.raises(TypeError, match="`symmetry` must be a rescaling"):
        minimize_over_rescalings(permutation, {}, sign=1)  # type: ignore[arg-type]
