"""find_symmetries: what is found, what is not, and what is said about it."""

from __future__ import annotations

import functools
import threading
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima import Objective
from flatminima.symmetries import Symmetries, check_equivalent, find_symmetries
from tests.symmetries.networks import NETWORKS, build, mlp, randomised

X = torch.randn(9, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def dimensions(symmetries: Symmetries) -> dict[str, int]:
    return {s.kind: s.dimension for s in symmetries if s.kind != "permutation"}


@pytest.mark.parametrize("name", NETWORKS)
def test_dimensions_are_those_of_the_architecture_and_nothing_is_left_uncovered(name: str) -> None:
    model, inputs = build(name)
    found = find_symmetries(model, inputs)
    assert dimensions(found) == NETWORKS[name][2]
    assert "permutation" in found.kinds()
    # Biases before a BatchNorm or within a sum are said to be free, and linear layers in a chain to be more so.
    assert [n for n in found.notes if not n.startswith("shifts of ") and name != "linear net"] == []


def elementwise_dimension(model: nn.Module, num_inputs: int, *, points: int = 6) -> int:
    """The numerical oracle: d is an elementwise rescaling symmetry iff J(θ)(d∘θ) = 0 at every θ."""
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    size = sum(s.numel() for s in shapes)
    rows = []
    generator = torch.Generator().manual_seed(3)
    for _ in range(points):
        inputs = torch.randn(100, num_inputs, generator=generator, dtype=torch.float64)
        theta = torch.randn(size, generator=generator, dtype=torch.float64)

        def outputs(t: Tensor, x: Tensor = inputs) -> Tensor:
            split = torch.split(t, [s.numel() for s in shapes])
            named = {n: v.view(s) for n, v, s in zip(names, split, shapes, strict=True)}
            return torch.func.functional_call(model, named, (x,)).reshape(-1)

        rows.append(torch.func.jacrev(outputs)(theta) * theta)
    values = torch.linalg.svdvals(torch.cat(rows))
    return size - int((values > 1e-9 * values[0]).sum())


@pytest.mark.parametrize(
    ("model", "num_inputs", "dimension"),
    [
        (mlp(4, 5, 6, 3), 4, 11),
        (mlp(4, 5, 6, 3, bias=False), 4, 11),
        (mlp(4, 5, 6, 3, activation=nn.Tanh), 4, 0),
        (mlp(4, 5, 6, 3, activation=lambda: nn.LeakyReLU(0.3)), 4, 11),
        (build("residual")[0], 3, 12),
        (build("functional")[0], 4, 11),
    ],
)
def test_node_dimension_agrees_with_the_null_space_of_stacked_jacobians(
    model: nn.Module, num_inputs: int, dimension: int
) -> None:
    assert elementwise_dimension(model, num_inputs) == dimension
    found = find_symmetries(model, torch.randn(9, num_inputs, dtype=torch.float64)).of_kind("node")
    assert sum(s.dimension for s in found) == dimension


@pytest.mark.parametrize("activation", [nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Softplus, nn.ELU])
def test_tanh_and_its_kin_have_no_rescaling_and_say_so_but_keep_permutations(activation: type[nn.Module]) -> None:
    found = find_symmetries(mlp(4, 5, 3, activation=activation), X)
    assert found.kinds() == ("permutation",)
    assert found.notes == (f"{activation.__name__.lower()} is not positively homogeneous: no rescaling",)


def test_only_the_layers_next_to_tanh_lose_their_rescaling() -> None:
    model = randomised(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)))
    assert dimensions(find_symmetries(model, X)) == {"layer": 1, "node": 5}


def test_adding_a_constant_fixes_the_scale_and_says_so() -> None:
    class Offset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x) + 1.0))

    found = find_symmetries(randomised(Offset()), X)
    assert found.kinds() == ("permutation",)
    assert found.notes == ("adding a constant is not positively homogeneous: no rescaling",)


def test_an_unknown_operation_fixes_what_it_touches_and_is_named() -> None:
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(F.relu(self.b(torch.cumsum(self.a(x), dim=1))))

    found = find_symmetries(randomised(Unknown()), X)
    assert dimensions(found) == {"layer": 1, "node": 6}
    assert found.of_kind("permutation")[0].parameters == ("b.weight", "b.bias", "c.weight")
    assert found.notes[0] == "cumsum is not covered here: the units that it touches are fixed"
    assert found.notes[1].startswith("rescaling a.weight, a.bias, ")  # a running sum is homogeneous
    assert len(found.notes) == 2


def test_a_sum_with_the_input_fixes_the_units_in_it() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(x + self.b(F.relu(self.a(x))))

    found = find_symmetries(randomised(Skip()), X)
    assert dimensions(found) == {"layer": 1, "node": 5}
    assert found.notes[0] == "a sum with an input or a constant: the units in it are fixed"
    assert found.notes[1].startswith("shifts of b.bias, c.bias, which make up for each other")
    assert len(found.notes) == 2


def test_a_mask_over_units_leaves_their_scale_and_fixes_their_order() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)
            self.register_buffer("mask", torch.rand(5))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x)) * self.mask)

    found = find_symmetries(randomised(Masked()), X)
    assert dimensions(found) == {"layer": 1, "node": 5}
    assert "permutation" not in found.kinds()
    assert found.notes == ("a product with an input or a constant that may differ from unit to unit: no reordering",)


def test_in_place_writing_into_a_view_is_never_a_wrong_symmetry() -> None:
    class Aliased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.gain = nn.Linear(4, 5), nn.Linear(5, 3), nn.Parameter(torch.rand(5) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h[:].mul_(self.gain)
            return self.b(F.relu_(h))

    found = find_symmetries(randomised(Aliased()), X)
    assert found.kinds() == ()
    assert found.notes[0] == "mul is not covered here: the units that it touches are fixed"
    assert all(note.startswith("rescaling ") for note in found.notes[1:])


def test_a_wrong_candidate_is_dropped_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    from flatminima.symmetries import rules
    from flatminima.symmetries.rules_elementwise import passes

    monkeypatch.setitem(rules._RULES, "tanh", passes)  # claims that tanh is homogeneous
    found = find_symmetries(mlp(4, 5, 3, activation=nn.Tanh), X)
    assert found.kinds() == ("permutation",)
    dropped = "found in the graph, but the outputs changed when it was tried: dropped"
    assert found.notes == (f"layer: {dropped}", f"node: {dropped}")


def test_zero_biases_do_not_hide_a_wrong_rule() -> None:
    class Offset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x))) + self.a.bias.sum()

    model = randomised(Offset())
    with torch.no_grad():
        model.a.bias.zero_()
    found = find_symmetries(model, X)
    assert "node" not in found.kinds()
    assert "a.bias is used in different roles: the units that it touches are fixed" in found.notes


def test_weights_used_in_two_roles_fix_their_units() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5, bias=False), nn.Linear(5, 6)
            self.c = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.a(x))
            return torch.cat([self.c(F.relu(self.b(h))), h @ self.a.weight], dim=1)

    found = find_symmetries(randomised(Tied()), X)
    assert dimensions(found) == {"layer": 1, "node": 6}
    assert found.notes == ("a.weight is used in different roles: the units that it touches are fixed",)


def test_a_parameter_under_two_names_is_one_parameter() -> None:
    model = mlp(4, 5, 5, 5, 3)
    model[4] = model[2]
    found = find_symmetries(model, X)
    assert dimensions(found) == {"layer": 1, "node": 5}
    move = found.of_kind("node")[0].random(torch.Generator().manual_seed(0))
    moved = move.apply(model)
    check_equivalent(model, moved, X)
    state = move.apply_state(model.state_dict())
    torch.testing.assert_close(state["2.weight"], moved[2].weight.detach())
    torch.testing.assert_close(state["4.weight"], moved[2].weight.detach())


def test_a_reparametrised_weight_is_fixed_not_broken() -> None:
    model = mlp(4, 5, 6, 3)
    nn.utils.parametrizations.weight_norm(model[2])
    found = find_symmetries(model, X)
    assert any("not covered" in note for note in found.notes)
    for symmetry in found:
        moved = symmetry.random(torch.Generator().manual_seed(0)).apply(model)
        check_equivalent(model, moved, X)


def test_frozen_parameters_move_like_others() -> None:
    model = mlp(4, 5, 3)
    model[0].weight.requires_grad_(False)
    (node,) = find_symmetries(model, X).of_kind("node")
    assert set(node.parameters) == {"0.weight", "0.bias", "2.weight"}
    assert not node.random().apply(model)[0].weight.requires_grad


def test_units_read_by_different_layers_are_not_exchanged() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            left, right = F.relu(self.a(x)).chunk(2, dim=1)
            return self.b(left) - self.c(right)

    found = find_symmetries(randomised(Split()), X)
    (permutation,) = found.of_kind("permutation")
    assert sorted(len(cell) for cell in permutation.cells) == [3, 3]
    (note,) = found.notes
    assert note.startswith("shifts of b.bias, c.bias, which make up for each other")


def test_statistics_of_the_batch_give_no_norm_scale() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.ReLU(), nn.Linear(5, 3))
    found = find_symmetries(randomised(model), X)
    assert "norm-scale" not in found.kinds()
    assert any("batch_norm" in note for note in found.notes)


def test_a_model_with_control_flow_on_data_gives_a_note_and_no_output(capfd: pytest.CaptureFixture[str]) -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum() > 0 else -self.a(x)

    found = find_symmetries(Branch(), X)
    assert len(found) == 0
    assert "could not trace" in found.notes[0]
    assert "could not trace" in found.describe()
    assert capfd.readouterr() == ("", "")


def test_a_random_model_gives_a_note() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(F.dropout(x, 0.5, training=True))

    found = find_symmetries(Noisy(), X)
    assert found.notes == ("the outputs differ between two runs in eval mode: nothing is claimed",)


def test_outputs_that_hold_a_parameter_fix_its_units() -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.b(F.relu(self.a(x))), self.a.weight

    assert find_symmetries(randomised(Penalised()), X).kinds() == ()


def test_a_model_that_cannot_be_copied_gives_a_note() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    model.lock = threading.Lock()
    (note,) = find_symmetries(model, X).notes
    assert "nothing is claimed" in note


def test_a_model_that_cannot_run_in_float64_gives_a_note() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x.float())

    (note,) = find_symmetries(Single(), X).notes
    assert "float64" in note


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(label_smoothing=0.1), F.cross_entropy, functools.partial(F.cross_entropy, reduction="sum")]
)
def test_softmax_shift_is_found_for_cross_entropy(loss: object) -> None:
    (shift,) = find_symmetries(mlp(4, 5, 3), X, loss=loss).of_kind("softmax shift")
    assert shift.dimension == 6
    assert shift.parameters == ("2.weight", "2.bias")


@pytest.mark.parametrize("loss", [None, nn.MSELoss(), F.mse_loss])
def test_softmax_shift_is_not_claimed_for_other_losses(loss: object) -> None:
    assert "softmax shift" not in find_symmetries(mlp(4, 5, 3), X, loss=loss).kinds()


def test_softmax_shift_needs_a_last_layer_without_a_nonlinearity() -> None:
    model = nn.Sequential(mlp(4, 5, 3), nn.ReLU())
    assert "softmax shift" not in find_symmetries(model, X, loss=F.cross_entropy).kinds()


def test_softmax_shift_of_a_convolution_that_gives_the_classes() -> None:
    model = randomised(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1)))
    images = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    (shift,) = find_symmetries(model, images, loss=F.cross_entropy).of_kind("softmax shift")
    moved = shift.random(torch.Generator().manual_seed(0)).apply(model)
    assert check_equivalent(model, moved, images, shift_invariant=True) < 1e-10


def test_softmax_shift_of_a_net_without_hidden_layer() -> None:
    found = find_symmetries(mlp(4, 3, bias=False), X, loss=F.cross_entropy)
    assert {s.kind: s.dimension for s in found} == {"softmax shift": 4}


def test_an_objective_brings_its_inputs_and_loss() -> None:
    model = mlp(4, 5, 3)
    objective = Objective(model, F.cross_entropy, [(X, torch.zeros(9, dtype=torch.long))])
    found = find_symmetries(objective)
    assert found.kinds() == ("layer", "node", "permutation", "softmax shift")


def test_nothing_of_the_users_model_changes() -> None:
    model = build("cnn")[0].train()
    inputs = build("cnn")[1]
    assert isinstance(inputs, Tensor)
    model.zero_grad()
    (model(inputs).sum()).backward()
    calls = []
    handle = model[0].register_forward_hook(lambda *_: calls.append(1))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    gradients = [p.grad for p in model.parameters()]
    rng = torch.get_rng_state()
    generator = torch.Generator().manual_seed(0)
    for symmetry in find_symmetries(model, inputs, loss=F.cross_entropy):
        symmetry.random(generator).apply(model)
    assert model.training
    assert model[0].training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(a is p.grad for a, p in zip(gradients, model.parameters(), strict=True))
    assert torch.equal(rng, torch.get_rng_state())
    assert len(model[0]._forward_hooks) == 1
    handle.remove()


def test_tracing_leaves_the_warning_filters_as_they_were() -> None:
    before = list(warnings.filters)
    find_symmetries(mlp(4, 5, 3), X)
    assert warnings.filters == before


def test_float32_models_and_compiled_models_are_covered() -> None:
    model = mlp(4, 5, 3).float()
    assert dimensions(find_symmetries(torch.compile(model, backend="eager"), X.float())) == {"layer": 1, "node": 5}


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="`model` must be"):
        find_symmetries("model", X)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`example_inputs` must be"):
        find_symmetries(mlp(4, 5, 3), 3.0)
    with pytest.raises(TypeError, match="`example_inputs` must be"):
        find_symmetries(mlp(4, 5, 3))
    with pytest.raises(ValueError, match="`kind` must be one of"):
        find_symmetries(mlp(4, 5, 3), X).of_kind("nodes")


def test_symmetries_are_a_sequence() -> None:
    found = find_symmetries(mlp(4, 5, 3), X)
    assert found[0].kind == "layer"
    assert found[1:].kinds() == ("node", "permutation")
    assert [s.kind for s in found] == list(found.kinds())
    assert len(found.describe().splitlines()) == 3


def test_a_cast_that_rounds_is_not_claimed_to_be_homogeneous() -> None:
    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(F.relu(self.b(F.relu(self.a(x)).long().to(x.dtype))))

    found = find_symmetries(randomised(Rounded()), X)
    assert dimensions(found) == {"layer": 1, "node": 6}
    assert found.notes == ("to is not covered here: the units that it touches are fixed",)
