"""Canonical forms: function unchanged, idempotent, the same from every point of the orbit."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima import Objective
from flatminima.symmetries import Symmetries, canonical_move, canonicalize, check_equivalent, find_symmetries, random_equivalent
from tests.symmetries.networks import build, mlp, randomised, vector

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
IMAGES = torch.randn(30, 2, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
FORMS = ("min-norm", "unit-norm", "min-trace")


def objective_of(name: str) -> Objective:
    if name == "cnn":
        return Objective(build("cnn")[0], F.cross_entropy, [(IMAGES, torch.arange(30) % 3)])
    return Objective(mlp(4, 5, 6, 3, seed=7), F.cross_entropy, [(X, torch.arange(40) % 3)])


def continuous(symmetries: Symmetries) -> list:  # type: ignore[type-arg]
    return [s for s in symmetries if s.kind != "permutation"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_canonical_form_keeps_the_loss_is_idempotent_and_the_same_all_over_the_orbit(name: str, form: str) -> None:
    objective = objective_of(name)
    symmetries = find_symmetries(objective)
    assert set(symmetries.kinds()) >= {"node", "softmax shift"}
    canonical = canonicalize(objective, form)
    inputs = IMAGES if name == "cnn" else X
    check_equivalent(objective.model, canonical.model, inputs, shift_invariant=True)
    torch.testing.assert_close(canonical.value(), objective.value(), rtol=1e-10, atol=0)
    expected = vector(canonical.model)
    size = expected.abs().max()
    assert float((vector(canonicalize(canonical, form).model) - expected).abs().max()) < 1e-8 * size
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        moved = random_equivalent(objective.model, continuous(symmetries), generator=generator, scale=1.0)
        assert float((vector(moved) - vector(objective.model)).abs().max()) > 0.1
        there = canonicalize(objective.with_model(moved), form)
        assert float((vector(there.model) - expected).abs().max()) < 1e-8 * size


def test_min_norm_balances_every_unit_and_beats_other_points() -> None:
    model = mlp(4, 5, 6, 3)
    canonical = canonicalize(model, "min-norm", example_inputs=X)
    assert isinstance(canonical, nn.Sequential)
    for i in (0, 2):
        into = canonical[i].weight.detach().square().sum(1) + canonical[i].bias.detach().square()
        out = canonical[i + 2].weight.detach().square().sum(0)
        torch.testing.assert_close(into, out, rtol=1e-11, atol=0)
    assert float(vector(canonical).norm()) < float(vector(model).norm())


def test_unit_norm_rows_with_their_bias_have_norm_one() -> None:
    canonical = canonicalize(mlp(4, 5, 6, 3), "unit-norm", example_inputs=X)
    for i in (0, 2):
        row = canonical[i].weight.detach().square().sum(1) + canonical[i].bias.detach().square()
        torch.testing.assert_close(row, torch.ones_like(row), rtol=1e-13, atol=0)


def test_min_trace_minimises_the_gauss_newton_trace_over_the_orbit() -> None:
    from flatminima.estimators import trace
    from flatminima.operators import GaussNewton

    objective = objective_of("mlp")
    symmetries = find_symmetries(objective)
    canonical = canonicalize(objective, "min-trace")
    move = canonical_move(objective, symmetries, "min-trace")
    assert move.converged
    assert move.gradient <= 1e-12
    least = float(trace(GaussNewton(canonical)))
    assert least < float(trace(GaussNewton(objective)))
    for seed in range(5):
        near = random_equivalent(
            canonical.model, symmetries.of_kind("node"), generator=torch.Generator().manual_seed(seed), scale=0.05
        )
        assert float(trace(GaussNewton(canonical.with_model(near)))) > least


def test_min_trace_does_not_see_the_l2_term() -> None:
    plain = objective_of("mlp")
    with_l2 = Objective(plain.model, F.cross_entropy, [(X, torch.arange(40) % 3)], l2=0.7)
    a, b = (vector(canonicalize(o, "min-trace").model) for o in (plain, with_l2))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_classes_are_centred_only_for_softmax_cross_entropy() -> None:
    model = mlp(4, 5, 3)
    centred = canonicalize(model, example_inputs=X, loss=F.cross_entropy)
    torch.testing.assert_close(centred[2].weight.detach().mean(0), torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(centred[2].bias.detach().mean(), torch.zeros((), dtype=torch.float64))
    check_equivalent(model, canonicalize(model, example_inputs=X), X)


def test_normalised_channels_have_variance_one_or_rows_of_norm_one() -> None:
    model, inputs = build("cnn")
    balanced = canonicalize(model, "min-norm", example_inputs=inputs)
    torch.testing.assert_close(balanced[1].running_var + 1e-5, torch.ones(4, dtype=torch.float64), rtol=1e-13, atol=0)
    unit = canonicalize(model, "unit-norm", example_inputs=inputs)
    rows = unit[4].weight.detach().square().sum((1, 2, 3))
    torch.testing.assert_close(rows, torch.ones_like(rows), rtol=1e-13, atol=0)


def test_rows_that_cannot_have_norm_one_come_as_near_as_the_variance_allows() -> None:
    model = randomised(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, eps=0.9), nn.ReLU(), nn.Linear(5, 3)))
    with torch.no_grad():
        model[0].weight.mul_(20)
    canonical = canonicalize(model, "unit-norm", example_inputs=X)
    check_equivalent(model, canonical, X)
    torch.testing.assert_close(canonical[1].running_var, torch.zeros(5, dtype=torch.float64))
    moved = random_equivalent(model, find_symmetries(model, X).of_kind("norm-scale"), scale=0.2)
    there = canonicalize(moved, "unit-norm", example_inputs=X)
    torch.testing.assert_close(vector(there), vector(canonical), rtol=1e-8, atol=1e-8)


def test_residual_stream_has_unit_rows_and_one_representative() -> None:
    model, inputs = build("residual")
    symmetries = find_symmetries(model, inputs)
    moved = random_equivalent(model, continuous(symmetries), generator=torch.Generator().manual_seed(0))
    for form in ("unit-norm", "min-norm"):
        a, b = (canonicalize(m, form, symmetries=symmetries) for m in (model, moved))
        check_equivalent(model, a, inputs)
        torch.testing.assert_close(vector(a), vector(b), rtol=1e-8, atol=1e-8)


def test_dead_units_are_reported_and_get_unit_rows() -> None:
    model = mlp(4, 5, 3)
    with torch.no_grad():
        model[2].weight[:, 1] = 0.0
    with pytest.warns(UserWarning, match=r"1 dead units have no min-norm representative .*: 0\[1\]"):
        canonical = canonicalize(model, "min-norm", example_inputs=X)
    row = canonical[0].weight.detach()[1].square().sum() + canonical[0].bias.detach()[1].square()
    assert float(row) == pytest.approx(1, rel=1e-13)
    move = canonical_move(model, find_symmetries(model, X), "min-norm")
    assert move.dead_units == ("0[1]",)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        canonicalize(model, "unit-norm", example_inputs=X)  # its row is not zero


def with_pruned_channels() -> nn.Module:
    """BatchNorm channel 1 has gamma = beta = 0, and unit 2 of the layer after it reads channel 1 alone."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 6, bias=False), nn.ReLU(), nn.Linear(6, 3))
    model = randomised(model)
    with torch.no_grad():
        model[1].weight[1] = model[1].bias[1] = 0.0
        model[3].weight[2, [0, 2, 3, 4]] = 0.0
    return model


@pytest.mark.filterwarnings("ignore:. dead units")
@pytest.mark.parametrize("form", FORMS)
def test_what_reads_a_row_of_zeros_is_zero_in_every_form_so_the_representative_is_one(form: str) -> None:
    objective = Objective(with_pruned_channels(), F.cross_entropy, [(X, torch.arange(40) % 3)])
    symmetries = find_symmetries(objective)
    moved = random_equivalent(objective.model, continuous(symmetries), generator=torch.Generator().manual_seed(0), scale=2.0)
    a, b = (canonicalize(o, form).model for o in (objective, objective.with_model(moved)))
    check_equivalent(objective.model, a, X, shift_invariant=True)
    for model in (a, b):
        assert isinstance(model, nn.Sequential)
        assert not bool(model[3].weight[:, 1].any())
        assert not bool(model[5].weight[:, 2].any())  # nothing is left of the row of its unit
    torch.testing.assert_close(vector(a), vector(b), rtol=1e-8, atol=1e-8)
    assert {"1[1]", "3[2]"} <= set(canonical_move(objective, symmetries, form).dead_units)


def test_zeros_for_what_reads_a_row_of_zeros_are_a_limit_and_no_move_that_can_be_undone() -> None:
    model = with_pruned_channels()
    move = canonical_move(model, find_symmetries(model, X), "min-norm").move
    with pytest.raises(ValueError, match="sets some to zero"):
        move.inverse()


@pytest.mark.filterwarnings("ignore:3 dead units")
def test_units_that_are_dead_on_the_data_keep_the_form_the_same_all_over_the_orbit() -> None:
    objective = Objective(mlp(4, 5, 6, 3, seed=0), F.cross_entropy, [(X, torch.arange(40) % 3)])
    symmetries = find_symmetries(objective)
    assert canonical_move(objective, symmetries, "min-trace").dead_units == ("2[1]", "2[2]", "2[3]")
    moved = random_equivalent(objective.model, continuous(symmetries), generator=torch.Generator().manual_seed(0))
    a, b = (canonicalize(o, "min-trace") for o in (objective, objective.with_model(moved)))
    torch.testing.assert_close(vector(a.model), vector(b.model), rtol=1e-8, atol=1e-8)


def test_a_network_without_symmetries_is_its_own_representative() -> None:
    model = mlp(4, 3)
    assert torch.equal(vector(canonicalize(model, example_inputs=X)), vector(model))


def test_an_objective_at_another_point_is_canonicalised_there() -> None:
    objective = objective_of("mlp")
    theta = 1.5 * objective.theta
    canonical = canonicalize(objective.at(theta), "min-norm")
    torch.testing.assert_close(canonical.value(), objective.value(theta), rtol=1e-10, atol=0)


def test_the_argument_is_not_changed() -> None:
    objective = objective_of("cnn")
    before: Tensor = vector(objective.model)
    for form in FORMS:
        canonicalize(objective, form)
    assert torch.equal(vector(objective.model), before)


def test_wrong_arguments_are_named() -> None:
    model = mlp(4, 5, 3)
    with pytest.raises(ValueError, match="`form` must be one of"):
        canonicalize(model, "min-trac", example_inputs=X)
    with pytest.raises(ValueError, match="must be an Objective for form 'min-trace'"):
        canonicalize(model, "min-trace", example_inputs=X)
    with pytest.raises(TypeError, match="`example_inputs` must be"):
        canonicalize(model)
