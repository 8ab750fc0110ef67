"""Rules of the operations without parameters of their own that act entry by entry, and of sums, products and averages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flatminima.symmetries.units import FIXED
from flatminima.symmetries.values import Activation, BufferRef, ParameterView, Term, Value, compressed, fixed_activation
from flatminima.symmetries.walk import Operation, Rule, Walk

__all__ = ["ELEMENTWISE_RULES", "pointwise"]


def passes(walk: Walk, op: Operation) -> Value:
    """f(s x) = s f(x) for s > 0, entry by entry: ReLU and its kin."""
    x = op["self"] if "self" in op.arguments else op["input"]
    return Activation(x.ids, x.shape) if isinstance(x, Activation) else None


def pointwise(walk: Walk, op: Operation) -> Value:
    """Any other function of each entry by itself: units keep their scale, and may still be reordered."""
    x = op["self"] if "self" in op.arguments else op["input"]
    if not isinstance(x, Activation) or len(op.tensors()) != 1 or op.out != x.shape:
        return None
    walk.not_homogeneous(op, x.ids)
    return Activation(x.ids, x.shape)


def softmax(walk: Walk, op: Operation) -> Value:
    """As any function of several entries it fixes scales; a common shift of them does not get through."""
    result = pointwise(walk, op)
    x = op["self"] if "self" in op.arguments else op["input"]
    if not isinstance(result, Activation) or x.affine is None:
        return result
    return replace(result, affine=replace(x.affine, is_normalised=True))


def clamp(walk: Walk, op: Operation) -> Value:
    """clamp(x, min=0) is a ReLU; other bounds fix the scale."""
    bounds = (op["min"], op["max"]) if op.name == "clamp" else (op["min"] if op.name == "clamp_min" else op["max"],)
    return passes(walk, op) if all(b is None or b == 0 for b in bounds) else pointwise(walk, op)


def threshold(walk: Walk, op: Operation) -> Value:
    """x where x > t, else v: a ReLU for t = v = 0."""
    return passes(walk, op) if op["threshold"] == 0 and op["value"] == 0 else pointwise(walk, op)


def dropout(walk: Walk, op: Operation) -> Value:
    """The identity, unless it is left on."""
    if op["train"]:
        return walk.unknown(op, f"{op.name} is active in eval mode: the units that it touches are fixed")
    return op["input"]


def add(walk: Walk, op: Operation) -> Value:
    """x + y: one scale for both; a parameter that is added is a bias, a constant fixes the scale."""
    x, y = _as_activation(walk, op["self"]), _as_activation(walk, op["other"])
    if isinstance(x, ParameterView) and isinstance(y, Activation):
        x, y = y, x
    if not isinstance(x, Activation):
        return None
    if isinstance(y, Activation):
        if _is_number(y):
            return pointwise_sum(walk, op, x)
        ids = _broadcast_ids(x.ids, len(op.out))
        other = _broadcast_ids(y.ids, len(op.out))
        walk.units.tie(ids, other)
        if x.is_fixed() != y.is_fixed():
            walk.notes["a sum with an input or a constant: the units in it are fixed"] += 1
        return Activation(torch.broadcast_tensors(ids, other)[0].contiguous(), op.out)
    if isinstance(y, ParameterView):
        return _add_bias(walk, op, x, y)
    return Activation(x.ids, x.shape) if y == 0 else pointwise_sum(walk, op, x)


def pointwise_sum(walk: Walk, op: Operation, x: Activation) -> Value:
    """x + c for one number c."""
    if bool(x.ids.any()):
        walk.units.scale.fix(x.ids)
        walk.notes["adding a constant is not positively homogeneous: no rescaling"] += 1
    return Activation(x.ids, x.shape)


def _add_bias(walk: Walk, op: Operation, x: Activation, bias: ParameterView) -> Value:
    """Record the bias; entries that several units share tie these units' scales."""
    if op["alpha"] not in (None, 1):
        return None
    ids = _broadcast_ids(x.ids, len(op.out))
    axes = [a for a, size in enumerate(ids.shape) if size > 1]
    lead = len(op.out) - len(bias.shape)
    if len(axes) > 1 or lead < 0:
        return None
    affine = None
    if not axes or axes[0] < lead or bias.shape[axes[0] - lead] == 1:
        first = ids.reshape(-1)[:1]
        walk.units.scale.tie(ids, first)
        walk.use(bias.name, Term(first.reshape([1] * len(bias.shape)), +1, None))
    else:
        walk.use(bias.name, bias.term(ids.reshape(-1), axes[0] - lead, +1))
        if x.affine is not None and x.affine.bias is None and bias.shape.numel() == ids.numel() and op.name == "add":
            affine = replace(x.affine, bias=bias.name)
    return Activation(ids, op.out, affine)


def multiply(walk: Walk, op: Operation) -> Value:
    """x · y where y is a number, a parameter (a gain for each unit) or free of units; x / y likewise."""
    x, y = _as_activation(walk, op["self"]), _as_activation(walk, op["other"])
    if op.name == "mul" and isinstance(y, Activation) and (not isinstance(x, Activation) or x.is_fixed()):
        if op.mutates and not y.is_fixed():
            return None  # what is written into takes up units under all its names
        x, y = y, x
    if not isinstance(x, Activation):
        return None
    if isinstance(y, ParameterView):
        return None if op.name == "div" or op.mutates else _multiply_gain(walk, op, x, y)
    if not isinstance(y, Activation):
        return Activation(x.ids, x.shape, x.affine)
    if not y.is_fixed():
        return None
    ids = _broadcast_ids(x.ids, len(op.out))
    other_shape = [1] * (len(op.out) - len(y.shape)) + list(y.shape)
    if any(other_shape[a] > 1 for a, size in enumerate(ids.shape) if size > 1):
        walk.units.order.fix(ids)
        walk.notes["a product with an input or a constant that may differ from unit to unit: no reordering"] += 1
    return Activation(ids, op.out)


def _multiply_gain(walk: Walk, op: Operation, x: Activation, gain: ParameterView) -> Value:
    if gain.shape.numel() == 1:
        walk.use(gain.name, Term(torch.zeros([1] * len(gain.shape), dtype=torch.int64), 0, None))
        return Activation(_broadcast_ids(x.ids, len(op.out)), op.out)
    wide = [axis for axis, size in enumerate(gain.shape) if size > 1]
    lead = len(op.out) - len(gain.shape)
    if len(wide) != 1 or lead < 0:
        return None
    axis = lead + wide[0]
    ids = Activation(_broadcast_ids(x.ids, len(op.out)), op.out).ids_along(axis)
    if ids is None:
        return None
    new = walk.units.new_block(gain.name, gain.shape[wide[0]])
    walk.units.order.tie(new, ids)
    walk.use(gain.name, gain.term(new, wide[0], +1), gain.term(ids, wide[0], -1, moves=False))
    shape = [1] * len(op.out)
    shape[axis] = new.numel()
    return Activation(new.reshape(shape), op.out)


def reduce(walk: Walk, op: Operation) -> Value:
    """Mean, sum, maximum over axes along which the unit does not change."""
    x = op["self"]
    if not isinstance(x, Activation) or not isinstance(op.out, torch.Size):
        return None
    dims = op["dim"]
    axes = range(len(x.shape)) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    axes = {a % max(len(x.shape), 1) for a in axes}
    if axes & set(x.varies_along()):
        return None
    kept = [size for a, size in enumerate(x.ids.shape) if a not in axes or op["keepdim"]]
    return Activation(x.ids.reshape(kept), op.out)


def spatial(walk: Walk, op: Operation) -> Value:
    """Pooling and resizing over trailing axes, channel by channel."""
    x = op["self"] if "self" in op.arguments else op["input"]
    if not isinstance(x, Activation):
        return None
    shape = op.out if isinstance(op.out, torch.Size) else op.out[0]
    num_axes = _number_of_axes(op.name)
    if any(a >= len(x.shape) - num_axes for a in x.varies_along()):
        return None
    result = Activation(x.ids, shape)
    return result if isinstance(op.out, torch.Size) else (result, *(fixed_activation(s) for s in op.out[1:]))


def pad(walk: Walk, op: Operation) -> Value:
    """Padding. Zeros on a unit's axis are units of their own: zero has every scale."""
    x, widths = op["self"], op["pad"]
    if not isinstance(x, Activation):
        return None
    padded = {len(x.shape) - 1 - i // 2 for i, width in enumerate(widths) if width != 0}
    constant = op.name == "constant_pad_nd" or op["mode"] in (None, "constant")
    if constant and op["value"] not in (None, 0):
        walk.not_homogeneous(op, x.ids)
    if not padded & set(x.varies_along()):
        return Activation(x.ids, op.out)
    if not constant:
        return None
    ids = torch.nn.functional.pad(x.full_ids(), tuple(widths), value=-1)
    free = ids == -1
    axis_ids = Activation(compressed(ids), op.out)
    if op["value"] not in (None, 0) or len(axis_ids.varies_along()) != 1:
        return Activation(torch.where(free, FIXED, ids), op.out) if op["value"] in (None, 0) else None
    free = axis_ids.ids == -1
    zeros: Tensor = walk.units.new_block("zeros", int(free.sum()))
    return Activation(axis_ids.ids.masked_scatter(free, zeros), op.out)


def constant(walk: Walk, op: Operation) -> Value:
    """A new tensor of the same shape, whatever the values are."""
    return fixed_activation(op.out) if isinstance(op.out, torch.Size) else None


def _as_activation(walk: Walk, value: Any) -> Any:
    if isinstance(value, BufferRef):
        walk.use(value.name)
        return fixed_activation(value.shape)
    return value


def _is_number(value: Activation) -> bool:
    return value.is_fixed() and value.shape.numel() == 1


def _broadcast_ids(ids: Tensor, ndim: int) -> Tensor:
    return ids.reshape([1] * (ndim - ids.ndim) + list(ids.shape))


def _number_of_axes(name: str) -> int:
    return next(int(c) for c in name if c.isdigit())


_HOMOGENEOUS = ("relu", "leaky_relu", "abs", "neg", "rrelu")
# fmt: off
_NOT_HOMOGENEOUS = (
    "tanh", "sigmoid", "gelu", "silu", "mish", "softplus", "elu", "celu", "selu", "relu6", "hardtanh", "hardswish", "hardsigmoid",
    "hardshrink", "softshrink", "tanhshrink", "logsigmoid", "log_sigmoid", "softsign", "exp", "expm1", "log", "log1p", "sin",
    "cos", "erf", "pow", "square", "sqrt", "rsqrt", "reciprocal",
)
# fmt: on
_SPATIAL = [f"{kind}{d}d" for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool") for d in (1, 2, 3)]
_SPATIAL += [f"max_pool{d}d_with_indices" for d in (1, 2, 3)]
_SPATIAL += ["upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d", "upsample_bicubic2d"]

ELEMENTWISE_RULES: dict[str, Rule] = {
    **dict.fromkeys(_HOMOGENEOUS, passes),
    **dict.fromkeys(_NOT_HOMOGENEOUS, pointwise),
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "_log_softmax"), softmax),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), clamp),
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"), dropout),
    **dict.fromkeys(("add", "sub", "maximum", "minimum"), add),
    **dict.fromkeys(("mul", "div"), multiply),
    **dict.fromkeys(("mean", "sum", "amax", "amin"), reduce),
    **dict.fromkeys(_SPATIAL, spatial),
    **dict.fromkeys(("pad", "constant_pad_nd"), pad),
    **dict.fromkeys(("zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_full"), constant),
    "threshold": threshold,
}
