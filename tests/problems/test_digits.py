from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits

from flatminima.problems import Dataset, digits


def _rows(data: Dataset) -> set[tuple[float, ...]]:
    images = torch.cat([data.inputs, data.test_inputs]).flatten(1)
    labels = torch.cat([data.targets, data.test_targets])
    return {(*image.tolist(), float(label)) for image, label in zip(images, labels, strict=True)}


def test_shapes_and_types_are_those_of_images_and_classes() -> None:
    data = digits(num_test=300)
    assert data.inputs.shape == (1497, 1, 8, 8)
    assert data.test_inputs.shape == (300, 1, 8, 8)
    assert data.inputs.dtype == data.test_inputs.dtype == torch.float32
    assert data.targets.dtype == data.test_targets.dtype == torch.int64
    assert float(data.inputs.min()) == 0.0
    assert float(data.inputs.max()) == 1.0
    assert data.targets.unique().tolist() == list(range(10))


def test_the_two_parts_together_are_the_original_images() -> None:
    raw = load_digits()
    expected = {(*(image.ravel() / 16).tolist(), float(label)) for image, label in zip(raw.images, raw.target, strict=True)}
    assert _rows(digits()) == expected


def test_the_split_depends_on_the_seed_alone() -> None:
    first, again, other = digits(seed=3), digits(seed=3), digits(seed=4)
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.test_targets, again.test_targets)
    assert not torch.equal(first.test_targets, other.test_targets)


@pytest.mark.parametrize("num_test", [0, 1797])
def test_a_split_without_one_part_is_refused(num_test: int) -> None:
    with pytest.raises(ValueError, match=rf"`num_test` must be .* Got {num_test}\."):
        digits(num_test=num_test)
