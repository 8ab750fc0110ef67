from __future__ import annotations

import torch
from torch import Tensor, nn

from flatminima.problems import digits_cnn, mlp, mnist_cnn
from flatminima.problems.initialisation import center_preactivations
from flatminima.problems.training import seeded


def _before_each_relu(model: nn.Sequential, inputs: Tensor) -> list[Tensor]:
    found = []
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.ReLU):
                found.append(inputs)
            inputs = layer(inputs)
    return found


def _positive_inputs(side: int) -> Tensor:
    return torch.rand(64, 1, side, side, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_what_enters_each_relu_has_mean_zero_in_each_unit_and_channel() -> None:
    for build, side in ((lambda: mlp([64, 32, 32, 10], dtype=torch.float64), 8), (lambda: mnist_cnn(dtype=torch.float64), 28)):
        with seeded(0):
            model = build()
        center_preactivations(model, _positive_inputs(side))
        for values in _before_each_relu(model, _positive_inputs(side)):
            means = values.transpose(0, 1).flatten(1).mean(dim=1)
            torch.testing.assert_close(means, torch.zeros_like(means), atol=1e-12, rtol=0)


def test_no_unit_starts_dead_though_some_do_without_it() -> None:
    inputs = _positive_inputs(8)
    with seeded(0):
        model = mlp([64, 200, 200, 10], dtype=torch.float64)

    def num_dead() -> int:
        return sum(int((values <= 0).all(dim=0).sum()) for values in _before_each_relu(model, inputs))

    assert num_dead() > 0
    center_preactivations(model, inputs)
    assert num_dead() == 0


def test_only_biases_before_a_relu_change() -> None:
    with seeded(0):
        model = mlp([64, 8, 10], dtype=torch.float64)
        convolutional = digits_cnn(dtype=torch.float64)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    center_preactivations(model, _positive_inputs(8))
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"linear1.bias"}

    state = {name: t.detach().clone() for name, t in convolutional.state_dict().items()}
    center_preactivations(convolutional, _positive_inputs(8))
    assert convolutional.training
    assert all(torch.equal(t, state[name]) for name, t in convolutional.state_dict().items())
