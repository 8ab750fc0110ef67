"""A trial accepts what leaves the outputs as they are on given and on drawn inputs, and no move without an effect of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flatminima.symmetries import find_symmetries
from flatminima.symmetries.inputs import Call
from flatminima.symmetries.linear_trials import Trials
from flatminima.symmetries.linear_walk import Part
from tests.symmetries.test_linear_chains import ROWS, made, pair
from tests.symmetries.test_uncovered import Net, linear

PARTS = {"i.weight": Part(0), "i.bias": Part()}
READERS = {"o.weight": 1}


def trials(rule: Callable[[Net, Tensor], Tensor], inputs: Tensor = ROWS) -> Trials:
    return Trials(made(lambda: pair(rule, linear(4, 4), linear(4, 4))), Call.of(inputs))


def test_a_matrix_fits_between_linear_layers() -> None:
    assert trials(lambda s, x: s.o(s.i(x))).can_mix(PARTS, READERS)


def test_a_bias_that_does_not_follow_is_seen() -> None:
    assert not trials(lambda s, x: s.o(s.i(x))).can_mix({"i.weight": Part(0)}, READERS)


def test_a_reader_that_does_not_follow_is_seen() -> None:
    assert not trials(lambda s, x: s.o(s.i(x)) + s.i(x).sum(1, keepdim=True)).can_mix(PARTS, READERS)


def test_what_holds_on_the_given_inputs_alone_is_seen() -> None:
    tried = trials(lambda s, x: s.o(s.i(x) * (1 + x - x.abs())), ROWS.abs())
    assert not tried.can_mix(PARTS, READERS)
    tried.runs = tried.runs[:1]
    assert tried.can_mix(PARTS, READERS)


def test_layers_without_effect_are_no_chain_no_sum_and_have_no_mean() -> None:
    tried = trials(lambda s, x: x + 0 * s.o(s.i(x)).sum())
    assert not tried.can_mix(PARTS, READERS)
    assert not tried.can_centre("i.weight", 0)
    assert not tried.can_share("i.weight", "o.weight")
    assert tried.free_shifts(["i.bias", "o.bias"]) == []


def test_free_shifts_are_those_in_the_null_space() -> None:
    tried = trials(lambda s, x: s.o(s.i(x)))
    assert tried.num_channels(["i.bias", "o.bias"]) == 8
    assert tried.free_shifts(["i.bias", "o.bias"]) == ["i.bias", "o.bias"]
    assert trials(lambda s, x: s.o(s.i(x).sin())).free_shifts(["i.bias", "o.bias"]) == []
    assert tried.free_shifts(["o.bias"]) == []


@pytest.mark.parametrize("factor", [1.0, -0.3, 40.0])
def test_a_sum_of_layers_is_found_with_its_factor(factor: float) -> None:
    assert trials(lambda s, x: (s.i(x) + factor * s.o(x)).tanh()).can_share("i.weight", "o.weight")
    assert not trials(lambda s, x: (s.i(x) + factor * s.o(x) * x).tanh()).can_share("i.weight", "o.weight")


def test_the_copy_is_as_before_after_every_trial() -> None:
    model = made(lambda: pair(lambda s, x: s.o(s.i(x)) + s.i(x), linear(4, 4), linear(4, 4)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tried = Trials(model, Call.of(ROWS))
    tried.can_mix(PARTS, READERS)
    tried.can_share("i.weight", "o.weight")
    tried.can_centre("i.weight", 0)
    tried.free_shifts(["i.bias", "o.bias"])
    for state in (model.state_dict(), tried.model.state_dict()):
        assert all(torch.equal(value, before[name]) for name, value in state.items())


def test_an_error_of_the_model_at_other_parameters_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Trials, *_: object) -> bool:
        raise RuntimeError("not here")

    monkeypatch.setattr(Trials, "can_mix", broken)
    model = made(lambda: pair(lambda s, x: s.o(s.i(x)), linear(4, 5), linear(5, 3)))
    assert any("could not all be tried numerically (RuntimeError: not here)" in n for n in find_symmetries(model, ROWS).notes)
