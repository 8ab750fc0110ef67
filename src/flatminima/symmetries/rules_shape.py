"""Rules of the operations that only move entries: run on the unit ids, they give the unit ids of their result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flatminima.symmetries.values import Activation, ParameterView, Value, compressed
from flatminima.symmetries.walk import Operation, Rule, Walk

__all__ = ["SHAPE_RULES", "rearranged_parameter"]


def rearrange(walk: Walk, op: Operation) -> Value:
    """Views, transposes, slices: the same operation on the ids."""
    x = op["self"] if "self" in op.arguments else op["input"]
    if isinstance(x, ParameterView):
        return rearranged_parameter(x, op)
    others = [v for v in op.tensors() if v is not x]
    if not isinstance(x, Activation) or others:
        return None
    rest = {k: v for k, v in op.arguments.items() if k not in ("self", "input")}
    ids = x.full_ids()
    if op.name in ("view", "_unsafe_view", "reshape"):  # a view of expanded ids may need a copy
        moved: Any = ids.reshape(op.out)
    else:
        moved = op.target(ids, **rest)
    if isinstance(moved, Tensor):
        return Activation(compressed(moved), op.out, x.affine)
    return tuple(Activation(compressed(m), s, x.affine) for m, s in zip(moved, op.out, strict=True))


def rearranged_parameter(x: ParameterView, op: Operation) -> ParameterView | None:
    """Return a parameter with its axes in another order, or None if more than that was done to it."""
    order = tuple(range(len(x.shape)))
    if op.name in ("t", "numpy_T", "mT", "transpose", "swapaxes"):
        a, b = (op["dim0"], op["dim1"]) if "dim0" in op.arguments else (-2, -1)
        if len(order) < 2 or (op.name == "numpy_T" and len(order) != 2):
            return x if len(order) < 2 else None
        swapped = list(order)
        swapped[a], swapped[b] = swapped[b], swapped[a]
        return x.permuted(tuple(swapped))
    if op.name == "permute":
        return x.permuted(tuple(d % len(order) for d in op["dims"]))
    return x if op.out == x.shape and op.name in _SAME else None


def same(walk: Walk, op: Operation) -> Value:
    """Copies and casts: nothing moves. The graph is in float64; a cast to anything else rounds."""
    if op["dtype"] not in (None, torch.float64):
        return None
    x = op["self"] if "self" in op.arguments else op["input"]
    return x if isinstance(x, Activation | ParameterView) and op.out == x.shape else None


def join(walk: Walk, op: Operation) -> Value:
    """Concatenation and stacking of activations."""
    parts = op["tensors"]
    if not isinstance(parts, list | tuple) or not all(isinstance(p, Activation) for p in parts):
        return None
    function: Callable[..., Tensor] = torch.stack if op.name == "stack" else torch.cat
    return Activation(compressed(function([p.full_ids() for p in parts], dim=op["dim"] or 0)), op.out)


_SAME = ("contiguous", "clone", "detach", "alias", "to", "_to_copy", "lift_fresh_copy", "view", "reshape")
# fmt: off
_REARRANGED = (
    "view", "_unsafe_view", "reshape", "flatten", "unflatten", "transpose", "swapaxes", "permute", "t", "numpy_T", "mT",
    "movedim", "unsqueeze", "squeeze", "expand", "slice", "select", "narrow", "split", "split_with_sizes", "chunk", "unbind",
    "tensor_split", "roll", "flip", "repeat", "tile", "repeat_interleave", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
)
# fmt: on

SHAPE_RULES: dict[str, Rule] = {
    **dict.fromkeys(_REARRANGED, rearrange),
    **dict.fromkeys(("contiguous", "clone", "detach", "alias", "to", "_to_copy", "lift_fresh_copy"), same),
    **dict.fromkeys(("cat", "stack"), join),
}
