"""Named parameters and the flat vector."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flatminima.params import ParameterSpace, vector_dtype


@given(shapes=st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_flatten_and_unflatten_are_inverse(shapes: list[list[int]], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    tensors = {f"p{i}": torch.randn(shape, generator=g) for i, shape in enumerate(shapes)}
    space = ParameterSpace({name: t.shape for name, t in tensors.items()})
    vector = space.flatten(tensors)
    assert vector.shape == (space.size,)
    assert all(torch.equal(part, tensors[name]) for name, part in space.unflatten(vector).items())


def test_a_tied_parameter_stands_once_and_a_frozen_one_not_at_all() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    assert ParameterSpace.of(model).names == ("0.weight", "0.bias", "1.bias")


def test_a_flat_vector_is_a_copy_and_its_parts_are_views() -> None:
    model = nn.Linear(2, 1)
    space = ParameterSpace.of(model)
    vector = space.flatten(dict(model.named_parameters()))
    vector.zero_()
    assert model.weight.abs().sum() > 0
    space.unflatten(vector)["bias"].fill_(3.0)
    assert vector.tolist() == [0.0, 0.0, 3.0]


def test_vectors_over_half_precision_parameters_are_single_precision() -> None:
    assert vector_dtype([torch.bfloat16, torch.float16]) == torch.float32
    assert vector_dtype([torch.bfloat16, torch.float64]) == torch.float64


def test_a_wrong_length_and_a_wrong_pick_are_refused() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"must have shape \(3,\)"):
        ParameterSpace.of(model).unflatten(torch.zeros(4))
    with pytest.raises(TypeError, match=r"name patterns, modules or parameters. Got int"):
        ParameterSpace.of(model, params=[3])  # type: ignore[list-item]
    model.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"must pick trainable parameters. Got frozen bias"):
        ParameterSpace.of(model, params="bias")


MODEL = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1).requires_grad_(False))


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([], ValueError, r"must pick at least one parameter. Got nothing. Leave it out"),
        ((), ValueError, r"must pick at least one parameter"),
        (nn.Linear(2, 2), ValueError, r"modules of this model. Got a foreign Linear"),
        ([MODEL[0], nn.Linear(2, 2)], ValueError, r"modules of this model. Got a foreign Linear"),
        (MODEL[1], ValueError, r"modules with parameters. Got ReLU, which has none"),
        (["0.*", MODEL[1]], ValueError, r"modules with parameters. Got ReLU, which has none"),
        (MODEL[2], ValueError, r"must pick trainable parameters. Got frozen 2.bias, 2.weight"),
        (3, TypeError, r"name patterns, modules or parameters. Got int"),
        (torch.ones(2), TypeError, r"name patterns, modules or parameters. Got Tensor"),
    ],
)
def test_a_pick_of_nothing_is_told_why(params: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ParameterSpace.of(MODEL, params)


def test_a_module_with_some_frozen_parameters_gives_the_others() -> None:
    assert ParameterSpace.of(MODEL, MODEL).names == ("0.weight", "0.bias")
    assert ParameterSpace.of(MODEL, list(MODEL[0].parameters())).names == ("0.weight", "0.bias")


def test_a_model_without_parameters_and_one_without_trainable_ones_are_told_apart() -> None:
    with pytest.raises(ValueError, match=r"at least one trainable parameter. Got ReLU, which has none"):
        ParameterSpace.of(nn.ReLU())
    with pytest.raises(ValueError, match="Got 2 parameters, none with requires_grad=True"):
        ParameterSpace.of(nn.Linear(2, 1).requires_grad_(False))
