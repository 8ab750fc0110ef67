from __future__ import annotations

import pytest
import torch

from flatminima.problems import Dataset


@pytest.fixture
def ten_examples() -> Dataset:
    inputs, targets = torch.arange(20.0).reshape(10, 2), torch.arange(10)
    return Dataset(inputs, targets, inputs[:3], targets[:3], "ten", "counting")


def test_batches_hold_every_training_example_once_in_order(ten_examples: Dataset) -> None:
    batches = ten_examples.batches(4)
    assert [len(y) for _, y in batches] == [4, 4, 2]
    assert torch.equal(torch.cat([x for x, _ in batches]), ten_examples.inputs)
    assert torch.equal(torch.cat([y for _, y in batches]), ten_examples.targets)


@pytest.mark.parametrize(("asked", "given"), [(1, 1), (7, 7), (10, 10), (11, 10), (None, 10)])
def test_batches_hold_the_first_examples_when_asked_for_fewer(ten_examples: Dataset, asked: int | None, given: int) -> None:
    targets = torch.cat([y for _, y in ten_examples.batches(3, num_examples=asked)])
    assert torch.equal(targets, torch.arange(given))


def test_batches_refuse_an_impossible_size(ten_examples: Dataset) -> None:
    with pytest.raises(ValueError, match=r"`batch_size` must be at least 1\. Got 0"):
        ten_examples.batches(0)
    with pytest.raises(ValueError, match=r"`num_examples` must be at least 1\. Got 0"):
        ten_examples.batches(3, num_examples=0)


def test_repr_is_a_label(ten_examples: Dataset) -> None:
    assert repr(ten_examples) == "Dataset('ten', num_train=10, num_test=3)"
