from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from flatminima.problems import digits_cnn, mlp, mnist_cnn


@pytest.mark.parametrize(
    ("build", "side", "num_parameters"),
    [
        (partial(mlp, [64, 32, 32, 10]), 8, 64 * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10),
        (digits_cnn, 8, 1922),
        (mnist_cnn, 28, 11978),
    ],
)
def test_networks_map_images_to_ten_logits(build: Callable[[], nn.Module], side: int, num_parameters: int) -> None:
    with torch.random.fork_rng(devices=[]):
        model = build().eval()
    assert model(torch.zeros(5, 1, side, side)).shape == (5, 10)
    assert sum(p.numel() for p in model.parameters()) == num_parameters
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(("build", "side"), [(partial(mlp, [64, 16, 10]), 8), (digits_cnn, 8), (mnist_cnn, 28)])
def test_networks_scale_with_their_last_layer_but_one(build: Callable[..., nn.Module], side: int) -> None:
    """ReLU and max pooling pass a positive factor on, which is what makes rescaling a symmetry of these networks."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = build(dtype=torch.float64).eval()
        x = torch.rand(4, 1, side, side, dtype=torch.float64)
    before = model(x)
    *_, hidden, output = (m for m in model.modules() if isinstance(m, nn.Linear | nn.BatchNorm2d))
    with torch.no_grad():
        for parameter in hidden.parameters():
            parameter.mul_(3.0)
        output.weight.div_(3.0)
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=0)


@pytest.mark.parametrize("widths", [[], [5]])
def test_an_mlp_needs_inputs_and_outputs(widths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"`widths` must hold at least 2 numbers"):
        mlp(widths)


def test_an_mlp_has_no_layer_without_units() -> None:
    with pytest.raises(ValueError, match=r"`widths` must be at least 1\. Got 0"):
        mlp([4, 0, 2])
