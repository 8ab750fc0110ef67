"""The fingerprint of a network and its data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flatminima as fm
from flatminima.objective import digest
from tests.trust.test_audit import generator, objective


def test_equal_tensors_have_equal_digests_however_they_lie_in_memory() -> None:
    table = torch.arange(12.0).reshape(3, 4)
    assert digest([table]) == digest([table.T.contiguous().T])
    assert len(digest([table])) == 16
    assert digest([]) != digest([table])


@pytest.mark.parametrize(
    "other",
    [
        torch.arange(12.0).reshape(4, 3),
        torch.arange(12.0, dtype=torch.float64).reshape(3, 4),
        torch.arange(12).reshape(3, 4),
        torch.nextafter(torch.arange(12.0), torch.tensor(99.0)).reshape(3, 4),
    ],
)
def test_shape_type_and_last_bit_count(other: Tensor) -> None:
    assert digest([other]) != digest([torch.arange(12.0).reshape(3, 4)])


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor(1.0), torch.tensor([True, False]), torch.ones(3, dtype=torch.bfloat16), torch.ones(2) * 1j, torch.ones(0)],
)
def test_tensors_of_every_kind_have_a_digest(tensor: Tensor) -> None:
    assert digest([tensor]) == digest([tensor.clone()])


def test_an_audit_names_its_network_and_its_data() -> None:
    def digests(audited: fm.Objective) -> dict[str, str]:
        found: dict[str, str] = fm.audit(audited, measures=["squared-norm"], num_moves=1, generator=generator()).settings[
            "sha256"
        ]
        return found

    base = digests(objective())
    assert base == digests(objective())
    fewer = digests(objective().subset(20))
    assert fewer["network"] == base["network"]
    assert fewer["data"] != base["data"]
    moved = objective()
    assert digests(moved.at(moved.theta + 1))["network"] != base["network"]
