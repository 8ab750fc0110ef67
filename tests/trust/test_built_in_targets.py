"""Whole audits of the built-in convolutional networks: every measure keeps what it declares on them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flatminima as fm


def _check(objective: fm.Objective, kinds: list[str]) -> None:
    audit = fm.audit(objective, num_moves=1, generator=torch.Generator().manual_seed(0))
    assert audit.complete
    assert audit.minimum is not None
    assert audit.minimum.verdict in ("minimum", "saddle")
    assert [record.kind for record in audit.symmetries] == kinds
    assert all(record.max_output_difference <= 1e-10 for record in audit.symmetries)
    assert [row.key for row in audit.rows] == list(fm.measures.available())
    for row in audit.rows:
        assert row.canonical is not None
        for attack in row.attacks:
            expected = {"survives"} if attack.declared_invariant else {"survives", "moves"}
            assert attack.verdict in expected, (row.key, attack)
    moved = {row.key for row in audit.rows if row.verdict == "moves"}
    assert {"largest-eigenvalue", "hessian-trace", "frobenius-norm", "epsilon-sharpness", "squared-norm"} <= moved


@pytest.mark.slow
def test_every_measure_keeps_its_declaration_on_a_network_with_batch_norm() -> None:
    _check(fm.problems.build("digits-cnn").objective(), ["layer", "node", "permutation", "norm-scale", "softmax shift"])


@pytest.mark.slow
def test_every_measure_keeps_its_declaration_on_a_network_for_mnist(mnist_path: Path) -> None:
    kinds = ["layer", "node", "permutation", "softmax shift"]
    _check(fm.problems.build("mnist-cnn", data=mnist_path).objective(), kinds)
