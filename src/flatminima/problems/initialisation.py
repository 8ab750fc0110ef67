"""Initial parameters at which every hidden unit takes part."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["center_preactivations"]


def center_preactivations(model: nn.Sequential, inputs: Tensor) -> None:
    """Change the biases before each ReLU so that what enters it has mean 0 over the inputs, in each unit or channel.

    With PyTorch's own start and inputs that are all positive, a few units are below 0 on every example; they get no gradient and
    stay dead, and a dead unit has no scale of its own. Layers without a bias are left alone (BatchNorm centres what they give).

    Args:
        model: A chain of layers, changed in place.
        inputs: Shape ``(batch, ...)``.

    References:
        After Salimans & Kingma (2016), "Weight Normalization", section 3, data-dependent initialisation: the shift without the
        scale.
    """
    layers, was_training = list(model), model.training
    model.eval()  # or BatchNorm would count this pass
    with torch.no_grad():
        for layer, following in zip(layers, [*layers[1:], nn.Identity()], strict=True):
            outputs = layer(inputs)
            if isinstance(following, nn.ReLU) and isinstance(layer, nn.Linear | nn.Conv2d) and layer.bias is not None:
                mean = outputs.mean(dim=[axis for axis in range(outputs.ndim) if axis != 1])
                layer.bias.sub_(mean)
                outputs = layer(inputs)
            inputs = outputs
    model.train(was_training)
