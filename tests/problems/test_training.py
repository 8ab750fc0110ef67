from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from flatminima.problems import Dataset, Training, evaluate, mlp, train
from flatminima.problems.training import _share_of_lr, seeded


@pytest.fixture
def clouds() -> Dataset:
    """Two clouds that a line separates."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 2, generator=g), torch.arange(200) % 2
    x[:, 0] += 6.0 * y - 3.0
    return Dataset(x[:150], y[:150], x[150:], y[150:], "clouds", "normal")


def _model(seed: int = 0) -> nn.Sequential:
    with seeded(seed):
        return mlp([2, 8, 2])


def _parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


_SETTINGS = Training(epochs=5, lr=0.1, batch_size=16)


def test_training_separates_separable_clouds(clouds: Dataset) -> None:
    result = train(_model(), clouds, replace(_SETTINGS, epochs=30), generator=torch.Generator().manual_seed(0))
    assert result.train_loss < 0.02
    assert result.train_accuracy == 1.0
    assert result.test_accuracy > 0.98
    assert result.num_epochs == 30


def test_training_repeats_bit_for_bit_from_a_generator(clouds: Dataset) -> None:
    runs = []
    for seed in (1, 1, 2):
        model = nn.Sequential(_model(), nn.Dropout(0.3))
        train(model, clouds, _SETTINGS, generator=torch.Generator().manual_seed(seed))
        runs.append(_parameters(model))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_without_a_generator_the_global_rng_orders_the_examples(clouds: Dataset) -> None:
    runs = []
    for seed in (1, 1, 2):
        model = _model()
        with seeded(seed):
            train(model, clouds, _SETTINGS)
        runs.append(_parameters(model))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_one_step_is_one_of_sgd(clouds: Dataset) -> None:
    model, by_hand = _model(), _model()
    settings = Training(epochs=1, lr=0.5, batch_size=150, momentum=0.0, weight_decay=0.1)
    train(model, clouds, settings, generator=torch.Generator().manual_seed(0))
    nn.functional.cross_entropy(by_hand(clouds.inputs), clouds.targets).backward()
    expected = torch.cat([(p - 0.5 * (p.grad + 0.1 * p)).detach().flatten() for p in by_hand.parameters()])
    torch.testing.assert_close(_parameters(model), expected, rtol=1e-5, atol=1e-7)


def test_the_rate_rises_then_falls_to_zero() -> None:
    shares = [_share_of_lr(step, 100) for step in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert max(shares) == pytest.approx(0.975, abs=0.01)
    assert shares.index(max(shares)) == 9
    assert all(a > b for a, b in pairwise(shares[9:]))
    assert shares[-1] < 1e-3
    assert _share_of_lr(0, 1) == 1.0


def test_training_stops_below_the_target_loss(clouds: Dataset) -> None:
    seen: list[tuple[int, int | None]] = []
    result = train(
        _model(),
        clouds,
        replace(_SETTINGS, lr=0.01, epochs=50, target_loss=0.1),
        generator=torch.Generator().manual_seed(0),
        progress=lambda done, total, message: seen.append((done, total)),
    )
    assert result.train_loss < 0.1
    assert 1 < result.num_epochs < 50
    assert seen == [(epoch, 50) for epoch in range(1, result.num_epochs + 1)]


def test_training_leaves_eval_mode_and_no_gradients_even_under_no_grad(clouds: Dataset) -> None:
    model = _model()
    before = _parameters(model)
    with torch.no_grad():
        train(model, clouds, _SETTINGS, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(_parameters(model), before)
    assert not any(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_settle_epochs_leave_the_running_statistics_alone(clouds: Dataset) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), _model())
    settings = replace(_SETTINGS, epochs=5, settle_epochs=2)
    train(model, clouds, settings, generator=torch.Generator().manual_seed(0))
    steps_per_epoch = -(-150 // 16)
    assert int(model[0].num_batches_tracked) == 3 * steps_per_epoch


def test_evaluate_gives_the_plain_means_and_keeps_every_mode(clouds: Dataset) -> None:
    model = nn.Sequential(nn.Dropout(0.5), _model())
    model[1].eval()
    loss, accuracy = evaluate(model, clouds.inputs, clouds.targets)
    logits = model[1](clouds.inputs).detach()
    assert loss == pytest.approx(float(nn.functional.cross_entropy(logits, clouds.targets)), rel=1e-6)
    assert accuracy == pytest.approx(float((logits.argmax(1) == clouds.targets).double().mean()))
    assert model.training
    assert model[0].training
    assert not model[1].training


def test_a_diverging_training_says_so(clouds: Dataset) -> None:
    with pytest.raises(ValueError, match=r"training loss must stay finite\. Got (nan|inf) after epoch \d+\. Use a smaller `lr`"):
        train(_model(), clouds, replace(_SETTINGS, lr=1e30), generator=torch.Generator().manual_seed(0))


def test_a_seed_is_not_a_generator(clouds: Dataset) -> None:
    with pytest.raises(TypeError, match=r"`generator` must be a torch\.Generator or None\. Got 0"):
        train(_model(), clouds, _SETTINGS, generator=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"epochs": 0}, r"`epochs` must be at least 1"),
        ({"batch_size": 0}, r"`batch_size` must be at least 1"),
        ({"lr": 0.0}, r"`lr` must be a finite number above 0"),
        ({"weight_decay": -1.0}, r"`weight_decay` must be a finite number of at least 0"),
        ({"target_loss": -1.0}, r"`target_loss` must be a finite number of at least 0"),
        ({"momentum": 1.0}, r"`momentum` must be below 1"),
        ({"settle_epochs": 6}, r"`settle_epochs` must be at most `epochs` \(5\)\. Got 6"),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        replace(_SETTINGS, **change)
