"""The walk over the graph proposes no group across a product, a group of channels or a nonlinearity, before anything is tried."""

from __future__ import annotations

import pytest
from torch.nn import functional as F  # noqa: N812

from flatminima.symmetries.graph import trace
from flatminima.symmetries.inputs import Call
from flatminima.symmetries.linear_walk import Proposals, propose
from tests.symmetries.test_linear_chains import FALSE, ROWS, TRUE, made, pair
from tests.symmetries.test_uncovered import linear

#: What the sizes and the trials tell, and the graph alone does not.
ONLY_TRIED = {"mean over features", "one layer for each head", "pixel shuffle", "chunks", "plus itself in reverse", "two heads"}


def proposed(name: str) -> tuple[Proposals, str]:
    cases = TRUE if name in TRUE else FALSE
    make, inputs, layers = cases[name]
    maker = layers.split(", ")[0]
    model = made(make)
    call = Call.of(inputs[:9])
    weight = maker if maker in dict(model.named_parameters()) else f"{maker}.weight"
    return propose(trace(model, call)), weight


@pytest.mark.parametrize("name", sorted(FALSE.keys() - ONLY_TRIED))
def test_what_a_nonlinearity_or_a_product_reads_is_spoiled(name: str) -> None:
    proposals, weight = proposed(name)
    assert weight in proposals.spoiled or weight not in proposals.readers


@pytest.mark.parametrize("name", TRUE)
def test_what_is_read_linearly_is_proposed_with_its_readers_and_all_that_is_added(name: str) -> None:
    proposals, weight = proposed(name)
    assert weight not in proposals.spoiled
    assert proposals.readers[weight]
    assert weight in proposals.parts[weight]


def test_biases_positions_gains_and_running_means_are_parts() -> None:
    proposals, weight = proposed("BatchNorm")
    parts = proposals.parts[weight]
    assert set(parts) == {"0.weight", "0.bias", "1.running_mean", "1.bias"}
    gains = (("1.running_var", 1e-5), ("1.weight", None))
    assert parts["0.weight"].gains == parts["0.bias"].gains == parts["1.running_mean"].gains == gains
    assert parts["1.bias"].gains == ()
    proposals, weight = proposed("embedding with positions")
    assert set(proposals.parts[weight]) == {"i.weight", "positions"}


def test_the_output_of_the_network_must_not_shift() -> None:
    model = made(lambda: pair(lambda s, x: s.o(F.relu(s.i(x))), linear(4, 5), linear(5, 3)))
    proposals = propose(trace(model, Call.of(ROWS[:9])))
    constrained = [set(shift) for shift in proposals.constraints if shift]
    assert {"i.bias"} in constrained
    assert {"o.bias"} in constrained
    assert proposals.spoiled == {"i.weight", "o.weight"}
