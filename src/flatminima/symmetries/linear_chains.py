"""Larger groups than rescalings, which are named and not moved along: layers without a nonlinearity between them.

- Layers that read each other without a nonlinearity between: any invertible matrix fits between them.
- Layers that read the same and are added: only the sum of their weights counts.
- Biases that are added, or that a layer with a bias reads without a nonlinearity between: one makes up for a shift of the other.
- A normalisation that subtracts the mean: it does not see one number that is added to all its inputs.

The graph is walked once more, with the layers of which every tensor is a linear function, and with its shift: the coefficients
(random numbers stand for the weights) with which every bias enters. What a nonlinearity reads must not shift.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flatminima.symmetries.graph import Graph, node_shapes
from flatminima.symmetries.settle import DEPENDS, shown

__all__ = ["linear_groups"]

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Linear:
    """A tensor: the layers that it is a linear function of, each with the node that it read, and how biases shift it."""

    layers: Mapping[str, object] = field(default_factory=dict)
    shift: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Parameter:
    name: str
    shape: torch.Size


class _Walk:
    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.spoiled: set[str] = set()
        self.joined: list[set[str]] = []
        self.readers: dict[str, list[str]] = {}
        self.widths: dict[str, int] = {}
        self.same_input: list[tuple[str, str]] = []
        self.constraints: list[Mapping[str, float]] = []
        self.centred: dict[str, list[str]] = {}

    def read(self, value: object) -> None:
        """A nonlinearity reads a value: nothing of it may be mixed or shifted."""
        if isinstance(value, _Linear):
            self.spoiled.update(value.layers)
            if value.shift:
                self.constraints.append(value.shift)

    def layer(self, node: torch.fx.Node, x: object, weight: _Parameter, bias: object, out_axis: int, mixes: bool) -> _Linear:
        name = weight.name.removesuffix(".weight")
        shift: dict[str, float] = {}
        if isinstance(x, _Linear):
            pads = any(p not in (0, "valid") for p in _flat(_argument(node, "padding")))
            if not mixes:
                self.spoiled.update(x.layers)
            for source in x.layers if mixes else ():
                self.readers.setdefault(source, []).append(name)
            if x.shift and pads:  # zeros around the image do not shift
                self.constraints.append(x.shift)
            elif x.shift:
                factor = self.random.standard_normal()
                shift = {key: factor * value for key, value in x.shift.items()}
        if isinstance(bias, _Parameter):
            shift[bias.name] = shift.get(bias.name, 0.0) + 1.0
        if name in self.widths or not mixes:  # read twice, or one channel at a time: no matrix fits
            self.spoiled.add(name)
        self.widths[name] = weight.shape[out_axis]
        return _Linear({name: node.args[0]}, shift)

    def add(self, node: torch.fx.Node, left: object, right: object) -> _Linear:
        values = [v if isinstance(v, _Linear) else _Linear() for v in (left, right)]
        for value, other in ((left, values[0]), (right, values[1])):
            if isinstance(value, _Parameter) and value.shape.numel() > 1:
                values[values.index(other)] = _Linear(shift={value.name: 1.0})
        first, second = values
        is_bias = any(isinstance(v, _Parameter | int | float) for v in (left, right))
        if first.layers and second.layers:
            self.joined.append({*first.layers, *second.layers})
            shared = [(a, b) for a, x in first.layers.items() for b, y in second.layers.items() if x is y and a != b]
            self.same_input += shared
        elif not is_bias:
            self.spoiled.update(first.layers, second.layers)
        shift = {k: first.shift.get(k, 0.0) + second.shift.get(k, 0.0) for k in {**first.shift, **second.shift}}
        return _Linear({**first.layers, **second.layers}, shift)


def linear_groups(graph: Graph) -> list[str]:
    """Return notes on the groups between layers without a nonlinearity between them."""
    walk = _Walk()
    values: dict[torch.fx.Node, object] = {}
    for node in graph.nodes:
        shape = node_shapes(node)
        if node.op == "placeholder":
            known = graph.parameters.get(node.name)
            values[node] = _Parameter(known, shape) if known is not None and isinstance(shape, torch.Size) else None
        elif node.op == "call_function":
            values[node] = _result(walk, node, values)
        else:
            for argument in node.all_input_nodes:
                walk.read(values.get(argument))
    return _notes(walk)


def _result(walk: _Walk, node: torch.fx.Node, values: Mapping[torch.fx.Node, object]) -> object:
    name, read = _name(node), [values.get(n) for n in node.all_input_nodes]
    if name in _LAYERS:
        x, weight, bias = (values.get(a) if isinstance(a, torch.fx.Node) else None for a in _layer_arguments(name, node))
        if isinstance(weight, _Parameter) and not isinstance(x, _Parameter):
            transposed = name in ("mm", "matmul", "addmm", "embedding") or name.startswith("conv_transpose")
            out_axis = 1 if transposed else 0
            mixes = not name.startswith("conv") or weight.shape[1] > 1 or _argument(node, "groups") in (None, 1)
            if name == "embedding":
                return walk.layer(node, None, weight, weight, out_axis, True)  # all rows can be shifted, like a bias
            return walk.layer(node, x, weight, bias, out_axis, mixes)
    first = read[0] if read else None
    others = [v for v in read[1:] if isinstance(v, _Linear)]
    if name in ("add", "sub") and len(node.args) > 1:
        left, right = (values.get(a) if isinstance(a, torch.fx.Node) else a for a in node.args[:2])
        return walk.add(node, left, right) if isinstance(left, _Linear) or isinstance(right, _Linear) else None
    if isinstance(first, _Parameter) and name in _REARRANGED and len(read) == 1:
        return _Parameter(first.name, node_shapes(node))
    if not isinstance(first, _Linear) or others:
        for value in read:
            walk.read(value)
        return None
    if name in _CENTRING and first.layers:
        walk.centred.setdefault(name, []).extend(first.layers)
    if name == "batch_norm" and not _argument(node, "training"):
        bias = next((v for v in read if isinstance(v, _Parameter) and v.name.endswith("bias")), None)
        return _Linear(first.layers, {**first.shift, **({bias.name: 1.0} if bias else {})})
    if name in _LINEAR or name in _REARRANGED or name is operator.getitem:
        return first
    if name.startswith(("max_pool", "adaptive_max_pool")):
        walk.spoiled.update(first.layers)
        return _Linear(shift=first.shift)
    walk.read(first)
    return None


def _notes(walk: _Walk) -> list[str]:
    notes, chained = [], set()
    groups: list[set[str]] = []
    for members in [{name} for name in walk.widths] + walk.joined:
        for group in [g for g in groups if g & members]:
            members = members | group
            groups.remove(group)
        groups.append(members)
    for group in groups:
        readers = dict.fromkeys(reader for name in group for reader in walk.readers.get(name, ()))
        if readers and not group & walk.spoiled and max(walk.widths[name] for name in group) > 1:
            chained |= {*group, *readers}
            notes.append(
                f"{shown([*sorted(group), *readers])}: no nonlinearity lies between them, so any invertible matrix fits "
                "between. Only rescalings and permutations are moved along, and measures that look at the size of the parameters "
                "depend on the rest"
            )
    for a, b in dict.fromkeys(walk.same_input):
        notes.append(f"{a} and {b} read the same and are added, so only the sum of their weights counts; {DEPENDS}")
    free = [name for name in _free(walk.constraints) if name.removesuffix(".bias") not in chained]
    if free:
        notes.append(f"shifts of {shown(free)}, which make up for each other; {DEPENDS}")
    for op, layers in walk.centred.items():
        notes.append(f"{op} is unchanged when one vector is added to all rows of what feeds it ({shown(layers)}); {DEPENDS}")
    return notes


def _free(constraints: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the biases that take part in a shift that no nonlinearity and no output sees."""
    rows = [c for c in constraints if c]
    names = list(dict.fromkeys(name for c in rows for name in c))
    if not names:
        return []
    matrix = np.array([[c.get(name, 0.0) for name in names] for c in rows])
    _, sizes, vectors = np.linalg.svd(matrix)
    null = vectors[int((sizes > 1e-9 * sizes[0]).sum()) :]
    return [name for name, column in zip(names, null.T, strict=True) if np.abs(column).max(initial=0.0) > 1e-9]


def _name(node: torch.fx.Node) -> Any:
    target = node.target
    return target._schema.name.split("::")[-1].removesuffix("_") if isinstance(target, torch._ops.OpOverload) else target


def _argument(node: torch.fx.Node, name: str) -> Any:
    """Return an argument of a node by its name in the schema, or its default."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            default = argument.default_value if argument.has_default_value() else None
            return node.kwargs.get(name, node.args[place] if place < len(node.args) else default)
    return None


def _layer_arguments(name: str, node: torch.fx.Node) -> tuple[Any, Any, Any]:
    """Return input, weight and bias."""
    arguments = [*node.args, None, None]
    if name == "addmm":
        return arguments[1], arguments[2], arguments[0]
    if name in ("mm", "matmul"):
        return arguments[0], arguments[1], None
    if name == "embedding":
        return arguments[1], arguments[0], None
    return arguments[0], arguments[1], arguments[2]


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value if value is not None else 0]


# fmt: off
_LAYERS = (
    "linear", "mm", "matmul", "addmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "embedding",
)
_CENTRING = ("layer_norm", "group_norm", "instance_norm")
_REARRANGED = (
    "view", "_unsafe_view", "reshape", "flatten", "unflatten", "transpose", "swapaxes", "permute", "t", "numpy_T", "mT",
    "movedim", "unsqueeze", "squeeze", "expand", "slice", "select", "narrow", "split", "split_with_sizes", "chunk", "unbind",
    "contiguous", "clone", "detach", "alias", "to", "_to_copy", "lift_fresh_copy",
)
_LINEAR = (
    "mean", "sum", "dropout", "feature_dropout", "alpha_dropout", "mul", "div", "neg", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "upsample_bilinear2d", "upsample_bicubic2d",
)
# fmt: on
