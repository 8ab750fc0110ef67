"""Reference networks: small, plain chains of named layers, all positively homogeneous between input and logits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from flatminima._checks import check_at_least

__all__ = ["digits_cnn", "mlp", "mnist_cnn"]


def mlp(widths: Sequence[int], *, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return Flatten, then Linear layers with ReLU between them.

    Args:
        widths: Number of inputs, of units in each hidden layer, and of outputs; at least two numbers.
        dtype: Data type of the parameters.

    Raises:
        ValueError: If there are fewer than two widths, or one is below 1.

    Example:
        >>> mlp([64, 32, 10])
        Sequential(
          (flatten): Flatten(start_dim=1, end_dim=-1)
          (linear1): Linear(in_features=64, out_features=32, bias=True)
          (relu1): ReLU()
          (linear2): Linear(in_features=32, out_features=10, bias=True)
        )
    """
    if len(widths) < 2:
        raise ValueError(f"`widths` must hold at least 2 numbers (inputs and outputs). Got {list(widths)}.")
    for width in widths:
        check_at_least("widths", width, 1)
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for depth, (num_inputs, num_outputs) in enumerate(pairwise(widths), start=1):
        layers[f"linear{depth}"] = nn.Linear(num_inputs, num_outputs, dtype=dtype)
        layers[f"relu{depth}"] = nn.ReLU()
    layers.popitem()  # no ReLU after the logits
    return nn.Sequential(layers)


def digits_cnn(*, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return two blocks of convolution, BatchNorm, ReLU and max pooling, then a Linear layer, for 8×8 images; 1,922 parameters.

    The convolutions have no bias: BatchNorm would cancel it.
    """
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 8, 3, padding=1, bias=False, dtype=dtype),
            norm1=nn.BatchNorm2d(8, dtype=dtype),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(8, 16, 3, padding=1, bias=False, dtype=dtype),
            norm2=nn.BatchNorm2d(16, dtype=dtype),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            linear=nn.Linear(16 * 2 * 2, 10, dtype=dtype),
        )
    )


def mnist_cnn(*, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return two convolutions of stride 2 and two Linear layers with ReLU between them, for 28×28 images; 11,978 parameters.

    References:
        LeCun et al. (1989), "Backpropagation applied to handwritten zip code recognition", section 3: the same order of layers,
        two of 5×5 kernels and stride 2, then two fully connected. Widths and ReLU differ, and every map reads all maps before it.
    """
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 8, 5, stride=2, dtype=dtype),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(8, 16, 5, stride=2, dtype=dtype),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            linear1=nn.Linear(16 * 4 * 4, 32, dtype=dtype),
            relu3=nn.ReLU(),
            linear2=nn.Linear(32, 10, dtype=dtype),
        )
    )
