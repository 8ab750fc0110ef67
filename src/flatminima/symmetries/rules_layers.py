"""Rules of the operations with parameters: linear maps, convolutions, normalisations, embeddings."""

from __future__ import annotations

from typing import Any

import torch

from flatminima.symmetries.values import Activation, BufferRef, ParameterView, Term, Value, fixed_activation
from flatminima.symmetries.walk import Absorption, Operation, Rule, Walk

__all__ = ["LAYER_RULES"]


def _is_parameter_or_none(value: Any) -> bool:
    return value is None or isinstance(value, ParameterView)


def linear(walk: Walk, op: Operation) -> Value:
    """y = x Wᵀ + b, W ``(out, in)``."""
    x, weight, bias = op["input"], op["weight"], op["bias"]
    if not isinstance(x, Activation) or not isinstance(weight, ParameterView) or not _is_parameter_or_none(bias):
        return None
    return walk.contract(op, x, len(x.shape) - 1, weight, bias, out_axis=0, in_axis=1)


def matmul(walk: Walk, op: Operation) -> Value:
    """x @ W and addmm(b, x, W), W ``(in, out)`` a parameter."""
    if op.name == "addmm":
        bias, x, weight = op["self"], op["mat1"], op["mat2"]
        if op["alpha"] != 1 or op["beta"] != 1 or not isinstance(bias, ParameterView) or len(bias.shape) != 1:
            return None
    else:
        bias, x = None, op["self"]
        weight = op["mat2"] if op.name == "mm" else op["other"]
    if not isinstance(x, Activation) or not isinstance(weight, ParameterView) or len(weight.shape) != 2:
        return None
    if bias is not None and bias.shape[0] != weight.shape[1]:
        return None
    return walk.contract(op, x, len(x.shape) - 1, weight, bias, out_axis=1, in_axis=0)


def convolution(walk: Walk, op: Operation) -> Value:
    """Convolutions over 1, 2 or 3 axes, W ``(out, in / groups, *kernel)``; transposed ones have W ``(in, out, *kernel)``."""
    x, weight, bias, groups = op["input"], op["weight"], op["bias"], op["groups"]
    if not isinstance(x, Activation) or not isinstance(weight, ParameterView) or not _is_parameter_or_none(bias):
        return None
    channel_axis = len(x.shape) - len(weight.shape) + 1
    if op.name.startswith("conv_transpose"):
        return None if groups != 1 else walk.contract(op, x, channel_axis, weight, bias, out_axis=1, in_axis=0)
    return walk.contract(op, x, channel_axis, weight, bias, out_axis=0, in_axis=1, groups=groups)


def batch_norm(walk: Walk, op: Operation) -> Value:
    """γ (x − mean) / sqrt(var + eps) + β with running statistics: the input's scale is absorbed, the output has its own."""
    x, weight, bias = op["input"], op["weight"], op["bias"]
    mean, var = op["running_mean"], op["running_var"]
    if not isinstance(x, Activation) or not all(map(_is_parameter_or_none, (weight, bias))):
        return None
    channel_ids = x.ids_along(1) if len(x.shape) > 1 else None
    if op["training"] and mean is None and var is None:
        return normalisation(walk, op)
    if op["training"] or channel_ids is None or not isinstance(mean, BufferRef) or not isinstance(var, BufferRef):
        return None
    name = weight.name.removesuffix(".weight") if weight else mean.name.removesuffix(".running_mean")
    ids = walk.units.new_block(name, x.shape[1])
    walk.units.order.tie(ids, channel_ids)
    if weight is None:
        walk.units.scale.fix(ids)
    else:
        walk.use(weight.name, weight.term(ids, 0, +1))
    if bias is not None:
        walk.use(bias.name, bias.term(ids, 0, +1))
    for buffer in (mean, var):  # their own law of scaling is kept in the absorption
        walk.use(buffer.name, Term(channel_ids, 0, 0))
    walk.absorb(Absorption(mean.name, var.name, float(op["eps"]), channel_ids))
    shape = [1] * len(x.shape)
    shape[1] = x.shape[1]
    return Activation(ids.reshape(shape), op.out)


def layer_norm(walk: Walk, op: Operation) -> Value:
    """LayerNorm and RMSNorm over the last axis mix their inputs and undo their common scale; γ and β give new units."""
    x, weight, bias = op["input"], op["weight"], op["bias"]
    if not isinstance(x, Activation) or not all(map(_is_parameter_or_none, (weight, bias))) or len(op["normalized_shape"]) != 1:
        return normalisation(walk, op)
    in_ids = x.ids_along(-1)
    if in_ids is None or (weight is None and bias is not None):
        return normalisation(walk, op)
    walk.normalises(op, x.ids)
    if weight is None:
        return Activation(x.ids, x.shape)
    ids = walk.units.new_block(weight.name.removesuffix(".weight"), x.shape[-1])
    walk.units.order.tie(ids, in_ids)
    walk.use(weight.name, weight.term(ids, 0, +1))
    if bias is not None:
        walk.use(bias.name, bias.term(ids, 0, +1))
    return Activation(ids.reshape([1] * (len(x.shape) - 1) + [-1]), op.out)


def normalisation(walk: Walk, op: Operation) -> Value:
    """Any other normalisation by the input's own statistics: it is not covered, but does not see the scale of its input."""
    x = op["input"]
    if not isinstance(x, Activation):
        return None
    walk.normalises(op, x.ids)
    if not x.is_fixed():
        walk.notes[f"{op.name} is not covered here: the units that it touches are fixed"] += 1
    walk.units.order.fix(x.ids)
    for value in op.tensors():
        if isinstance(value, ParameterView | BufferRef):
            walk.use(value.name)
    return fixed_activation(op.out) if isinstance(op.out, torch.Size) else None


def instance_norm(walk: Walk, op: Operation) -> Value:
    """InstanceNorm by the statistics of each example; with running statistics it is not covered."""
    return normalisation(walk, op) if op["use_input_stats"] else None


def prelu(walk: Walk, op: Operation) -> Value:
    """max(0, x) + a min(0, x): homogeneous; a slope for each channel is reordered with it and never scaled."""
    x, weight = op["self"], op["weight"]
    if not isinstance(x, Activation) or not isinstance(weight, ParameterView):
        return None
    if weight.shape.numel() == 1:
        walk.use(weight.name, Term(torch.zeros([1] * len(weight.shape), dtype=torch.int64), 0, None))
        return Activation(x.ids, x.shape)
    ids = x.ids_along(1) if len(x.shape) > 1 else None
    if ids is None:
        return None
    walk.use(weight.name, weight.term(ids, 0, 0))
    return Activation(x.ids, x.shape)


def embedding(walk: Walk, op: Operation) -> Value:
    """Rows of W ``(entries, features)`` picked by an integer input: one unit a feature."""
    weight = op["weight"]
    if not isinstance(weight, ParameterView) or not isinstance(op["indices"], Activation):
        return None
    index = fixed_activation(torch.Size((1, weight.shape[0])))
    return walk.contract(op, index, len(op.out) - 1, weight, None, out_axis=1, in_axis=0)


LAYER_RULES: dict[str, Rule] = {
    "linear": linear,
    "mm": matmul,
    "matmul": matmul,
    "addmm": matmul,
    "conv1d": convolution,
    "conv2d": convolution,
    "conv3d": convolution,
    "conv_transpose1d": convolution,
    "conv_transpose2d": convolution,
    "conv_transpose3d": convolution,
    "batch_norm": batch_norm,
    "layer_norm": layer_norm,
    "rms_norm": layer_norm,
    "group_norm": normalisation,
    "instance_norm": instance_norm,
    "prelu": prelu,
    "embedding": embedding,
}
