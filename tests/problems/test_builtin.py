from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import flatminima as fm
from flatminima import problems
from flatminima.problems import Problem

_progress: list[tuple[int, int | None]] = []


@pytest.fixture(scope="module")
def digits_mlp() -> Problem:
    return problems.build("digits-mlp", progress=lambda done, total, message: _progress.append((done, total)))


@pytest.fixture(scope="module")
def digits_cnn() -> Problem:
    return problems.build("digits-cnn")


def _point(problem: Problem) -> str:
    """Return what an audit would call the point that the training reached."""
    found = fm.audit(problem.objective(), measures=["squared-norm"], num_moves=1, generator=torch.Generator().manual_seed(0))
    assert found.minimum is not None
    return found.minimum.verdict


def _check_is_ready_to_measure(problem: Problem) -> None:
    assert not any(module.training for module in problem.model.modules())
    assert {p.dtype for p in problem.model.parameters()} == {torch.float32}
    assert all(p.requires_grad and p.grad is None for p in problem.model.parameters())
    inputs, targets = problem.data[0]
    assert problem.loss(problem.model(inputs), targets).shape == ()
    json.dumps(dict(problem.settings))


def test_digits_mlp_generalises_and_is_trained_until_it_stands_still(digits_mlp: Problem) -> None:
    _check_is_ready_to_measure(digits_mlp)
    assert digits_mlp.result.test_accuracy > 0.95
    assert digits_mlp.result.train_loss < 0.01
    assert _point(digits_mlp) in ("minimum", "saddle")
    assert sum(len(y) for _, y in digits_mlp.data) == 1437


def test_digits_cnn_generalises_and_is_trained_until_it_stands_still_in_eval_mode(digits_cnn: Problem) -> None:
    _check_is_ready_to_measure(digits_cnn)
    assert digits_cnn.result.test_accuracy > 0.97
    assert digits_cnn.result.train_loss < 0.01
    assert _point(digits_cnn) in ("minimum", "saddle")
    assert any(isinstance(module, nn.BatchNorm2d) for module in digits_cnn.model.modules())


def test_mnist_cnn_generalises_and_is_trained_until_it_stands_still(mnist_path: Path) -> None:
    problem = problems.build("mnist-cnn", data=mnist_path)
    _check_is_ready_to_measure(problem)
    assert problem.result.test_accuracy > 0.88  # from 1,000 images
    assert problem.result.train_loss < 0.01
    assert _point(problem) in ("minimum", "saddle")
    assert sum(len(y) for _, y in problem.data) == 1000


def _num_dead_units(problem: Problem) -> int:
    """Count the units and channels that are 0 on every example that is measured."""
    outputs = torch.cat([x for x, _ in problem.data])
    num_dead = 0
    with torch.no_grad():
        for layer in problem.model.children():
            outputs = layer(outputs)
            if isinstance(layer, nn.ReLU):
                num_dead += int((outputs.transpose(0, 1).flatten(1) == 0).all(dim=1).sum())
    return num_dead


def test_the_digits_networks_have_no_dead_unit(digits_mlp: Problem, digits_cnn: Problem) -> None:
    assert _num_dead_units(digits_mlp) == 0
    assert _num_dead_units(digits_cnn) == 0


def test_a_build_repeats_bit_for_bit_from_its_seed(digits_mlp: Problem) -> None:
    with torch.no_grad():
        again = problems.build("digits-mlp")
    for p, q in zip(digits_mlp.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert again.result == digits_mlp.result
    assert again.settings == digits_mlp.settings


def test_another_seed_gives_another_network(digits_mlp: Problem) -> None:
    other = problems.build("digits-mlp", seed=1)
    assert not torch.equal(next(other.model.parameters()), next(digits_mlp.model.parameters()))
    assert other.settings["seed"] == 1


def test_settings_name_what_repeats_the_run(digits_mlp: Problem) -> None:
    assert digits_mlp.settings["training"]["epochs"] == digits_mlp.result.num_epochs
    assert digits_mlp.settings["torch"] == torch.__version__
    assert digits_mlp.settings["num_train"] == 1437


def test_the_objective_is_the_training_loss(digits_mlp: Problem) -> None:
    objective = digits_mlp.objective()
    assert float(objective.value()) == pytest.approx(digits_mlp.result.train_loss, rel=1e-5)


def test_progress_is_reported_after_every_epoch(digits_mlp: Problem) -> None:
    num_epochs = digits_mlp.result.num_epochs
    assert _progress == [(epoch, num_epochs) for epoch in range(1, num_epochs + 1)]


@pytest.mark.parametrize("name", problems.names())
def test_every_target_is_described_in_one_line(name: str) -> None:
    assert 20 < len(problems.describe(name)) < 100
    assert "\n" not in problems.describe(name)


def test_an_unknown_target_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"must be one of .* Got 'digit-mlp'\. Did you mean 'digits-mlp'\?"):
        problems.build("digit-mlp")


def test_mnist_needs_a_path() -> None:
    with pytest.raises(ValueError, match=r"`data` must name a file or folder of MNIST for mnist-cnn"):
        problems.build("mnist-cnn")


def test_a_path_that_would_be_ignored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`data` must be None for digits-mlp"):
        problems.build("digits-mlp", data=tmp_path)


def test_a_wrong_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        problems.build("mnist-cnn", data=tmp_path / "nowhere")
