"""The walk that proposes larger groups than rescalings: of which layers is every tensor a linear function, and how does it shift?

It goes over the same graph as the walk for rescalings and uses its tables of operations, with other rules, as those let a ReLU
pass and stop at an attention. A tensor's shift are the coefficients (random numbers stand for the weights) with which every bias
enters it. What is proposed here need not hold: it is tried numerically before it is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from flatminima.symmetries.graph import Graph, Operation, interpret, leaves, node_shapes
from flatminima.symmetries.rules_elementwise import ELEMENTWISE_RULES, dropout, pad, reduce, spatial
from flatminima.symmetries.rules_layers import (
    LAYER_RULES,
    batch_norm,
    convolution,
    embedding,
    instance_norm,
    layer_norm,
    linear,
    matmul,
    normalisation,
)
from flatminima.symmetries.rules_shape import SHAPE_RULES, rearranged_parameter
from flatminima.symmetries.values import BufferRef, ParameterView, Value
from flatminima.symmetries.walk import Rule

__all__ = ["Gain", "Part", "Proposals", "propose"]

#: Factor of every channel: a tensor by name, or (with an eps) 1 / sqrt(tensor + eps).
Gain = tuple[str, float | None]


@dataclass(frozen=True)
class Part:
    """A tensor that is added to a layer's output, or is the weight of that layer.

    Attributes:
        axis: Its axis of channels; None for the last one, or the only one that is longer than 1.
        gains: What its channels are multiplied by afterwards.
    """

    axis: int | None = None
    gains: tuple[Gain, ...] = ()


@dataclass(frozen=True)
class _Linear:
    """A tensor that depends on the inputs.

    Attributes:
        layers: The weights of the layers that it is a linear function of, each with the tensor that the layer read.
        parts: These weights, and the biases and running means that are added to them.
        shift: Coefficient with which every bias enters.
    """

    layers: Mapping[str, object] = field(default_factory=dict)
    parts: Mapping[str, Part] = field(default_factory=dict)
    shift: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Proposals:
    """What the walk over the graph gathers.

    Attributes:
        joined: Sets of layers that are added; each layer is one by itself.
        spoiled: Layers of which something nonlinear reads the output.
        parts: For every layer what is added to its output before another reads it, its own weight included.
        readers: For every layer the weights that read its output, with their axis of inputs.
        same_input: Pairs of layers that read the same and are added.
        constraints: Shifts that must be zero.
        out_axes: Axis of outputs of every weight.
        centred: Layers that a normalisation which subtracts the mean reads, by its name.
    """

    joined: list[set[str]] = field(default_factory=list)
    spoiled: set[str] = field(default_factory=set)
    parts: dict[str, dict[str, Part]] = field(default_factory=dict)
    readers: dict[str, dict[str, int]] = field(default_factory=dict)
    same_input: list[tuple[str, str]] = field(default_factory=list)
    constraints: list[Mapping[str, float]] = field(default_factory=list)
    centred: dict[str, list[str]] = field(default_factory=dict)
    out_axes: dict[str, int] = field(default_factory=dict)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def result(self, op: Operation) -> Value:
        """Return what is known of the result of an operation; one that no rule covers counts as a nonlinearity."""
        x = op["self"] if "self" in op.arguments else op["input"]
        if isinstance(x, ParameterView) and op.name in SHAPE_RULES and isinstance(op.out, torch.Size):
            return rearranged_parameter(x, op) or ParameterView(x.name, op.out, ())
        value = self._covered(op)
        if value is None:
            self.read(op.values())
            value = _Linear()
        return value if isinstance(op.out, torch.Size | None) else (value,) * len(op.out)

    def read(self, values: Iterable[Value]) -> None:
        """A nonlinearity reads values: nothing of them may be mixed or shifted."""
        for value in values:
            if isinstance(value, _Linear):
                self.spoiled.update(value.layers)
                self.constraints.append(value.shift)

    def _covered(self, op: Operation) -> _Linear | None:
        if op.name in LAYER_RULES:
            layer = _LAYERS.get(LAYER_RULES[op.name])
            return layer(self, op) if layer else None
        if op.name in ("add", "sub"):
            return self._sum(op)
        if op.name in ("mul", "div"):
            return self._product(op)
        if op.name == "scaled_dot_product_attention":
            self.read((op["query"], op["key"]))
            return op["value"] if isinstance(op["value"], _Linear) else None
        tensors = [v for v in op.values() if isinstance(v, _Linear | ParameterView)]
        if len(tensors) != 1 or not isinstance(tensors[0], _Linear):
            return None
        x = tensors[0]
        rule = ELEMENTWISE_RULES.get(op.name)
        if op.name == "neg" or op.name in SHAPE_RULES or rule in (dropout, reduce, spatial, pad):
            if rule is pad:  # what is added does not shift
                self.constraints.append(x.shift)
                return replace(x, shift={})
            if "max" in op.name or op.name == "amin":
                self.spoiled.update(x.layers)
                return _Linear(shift=x.shift)
            return x
        return None

    def _linear(self, op: Operation) -> _Linear | None:
        return self._layer(op["input"], op["weight"], op["bias"], 0, 1)

    def _matmul(self, op: Operation) -> _Linear | None:
        if op.name == "addmm":
            return self._layer(op["mat1"], op["mat2"], op["self"], 1, 0)
        x, y = op["self"], op["mat2"] if op.name == "mm" else op["other"]
        if isinstance(x, ParameterView):
            return self._layer(y, x, None, 0, 1)
        if isinstance(x, _Linear) and isinstance(y, _Linear):  # an attention: a mean of the rows of y
            self.read((x,))
            return y
        return self._layer(x, y, None, 1, 0)

    def _convolution(self, op: Operation) -> _Linear | None:
        x, is_transposed = op["input"], op.name.startswith("conv_transpose")
        if op["groups"] != 1:
            return None
        padding = op["padding"] if isinstance(op["padding"], list | tuple) else (op["padding"],)
        shifts = not is_transposed and all(p in (0, "valid") for p in padding)  # zeros around the image do not shift
        return self._layer(x, op["weight"], op["bias"], int(is_transposed), int(not is_transposed), shifts=shifts)

    def _embedding(self, op: Operation) -> _Linear | None:
        return self._layer(op["indices"], op["weight"], op["weight"], 1, 0)  # all rows can be shifted, like a bias

    def _layer(self, x: Value, weight: Value, bias: Value, out_axis: int, in_axis: int, *, shifts: bool = True) -> _Linear | None:
        """Record that a layer reads ``x``; without ``shifts``, a shift of ``x`` is no shift of the result."""
        if not isinstance(x, _Linear) or not isinstance(weight, ParameterView) or not isinstance(bias, ParameterView | None):
            return None
        if len(weight.dims) < 2:
            return None
        for source in x.layers:
            self.readers.setdefault(source, {})[weight.name] = weight.dims[in_axis]
            self.parts[source] = {**x.parts, **self.parts.get(source, {})}
        self.out_axes[weight.name] = weight.dims[out_axis]
        parts = {weight.name: Part(weight.dims[out_axis])}
        shift = self._scaled(x.shift) if shifts else {}
        if not shifts:
            self.constraints.append(x.shift)
        if bias is not None:
            parts.setdefault(bias.name, Part())
            shift[bias.name] = shift.get(bias.name, 0.0) + 1.0
        return _Linear({weight.name: x}, parts, shift)

    def _normalisation(self, op: Operation) -> _Linear | None:
        x, weight, bias = op["input"], op["weight"], op["bias"]
        mean, var = op["running_mean"], op["running_var"]
        if not isinstance(x, _Linear):
            return None
        if op.name in ("layer_norm", "group_norm", "instance_norm"):
            self.centred.setdefault(op.name, []).extend(x.layers)
        is_fixed = op.name == "batch_norm" and not op["training"] and isinstance(mean, BufferRef) and isinstance(var, BufferRef)
        if not is_fixed or not all(isinstance(v, ParameterView | None) for v in (weight, bias)):
            return None
        gains: list[Gain] = [(var.name, float(op["eps"]))] + ([(weight.name, None)] if weight is not None else [])
        result = self._gained(replace(x, parts={**x.parts, mean.name: Part(0)} if x.layers else {}), gains)
        if bias is None:
            return result
        parts = {**result.parts, bias.name: Part(0)} if x.layers else {}
        return replace(result, parts=parts, shift={**result.shift, bias.name: 1.0})

    def _sum(self, op: Operation) -> _Linear | None:
        values, factor = (op["self"], op["other"]), float(op["alpha"] or 1) * (-1 if op.name == "sub" else 1)
        if not any(isinstance(v, _Linear) for v in values):
            return None
        first, second = (_as_bias(v) for v in values)
        for x, y in ((first, second), (second, first)):
            if not x.parts:
                self.spoiled.update(y.layers)
        if first.layers and second.layers:
            self.joined.append({*first.layers, *second.layers})
            self.same_input += [(a, b) for a, x in first.layers.items() for b, y in second.layers.items() if x is y and a != b]
        names = dict.fromkeys((*first.shift, *second.shift))
        shift = {name: first.shift.get(name, 0.0) + factor * second.shift.get(name, 0.0) for name in names}
        return _Linear({**first.layers, **second.layers}, {**second.parts, **first.parts}, shift)

    def _product(self, op: Operation) -> _Linear | None:
        x, y = op["self"], op["other"]
        if op.name == "mul" and not isinstance(x, _Linear):
            x, y = y, x
        if not isinstance(x, _Linear) or isinstance(y, _Linear) or (op.name == "div" and not isinstance(y, int | float)):
            return None
        if isinstance(y, ParameterView | BufferRef):
            return self._gained(x, [(y.name, None)] if y.shape.numel() > 1 else [])
        return x

    def _gained(self, x: _Linear, gains: list[Gain]) -> _Linear:
        """Return a tensor whose channels have been multiplied by numbers."""
        parts = {name: replace(part, gains=(*part.gains, *gains)) for name, part in x.parts.items()}
        return _Linear(x.layers, parts, self._scaled(x.shift))

    def _scaled(self, shift: Mapping[str, float]) -> dict[str, float]:
        factor = float(self.random.standard_normal())
        return {name: factor * value for name, value in shift.items()}


def propose(graph: Graph) -> Proposals:
    """Walk over a graph."""
    proposals = Proposals()

    def leaf(node: torch.fx.Node) -> Value:
        shape = node_shapes(node)
        if node.name in graph.parameters:
            return ParameterView(graph.parameters[node.name], shape, tuple(range(len(shape))))
        return BufferRef(graph.buffers[node.name], shape) if node.name in graph.buffers else _Linear()

    proposals.read(leaves(interpret(graph, leaf, proposals.result)))
    return proposals


def _as_bias(value: Value) -> _Linear:
    """Return a term of a sum: a parameter is a bias, a constant is nothing linear."""
    if isinstance(value, ParameterView):
        return _Linear({}, {value.name: Part()}, {value.name: 1.0})
    return value if isinstance(value, _Linear) else _Linear()


_LAYERS: dict[Rule, Callable[[Proposals, Operation], _Linear | None]] = {
    linear: Proposals._linear,
    matmul: Proposals._matmul,
    convolution: Proposals._convolution,
    embedding: Proposals._embedding,
    **dict.fromkeys((batch_norm, layer_norm, normalisation, instance_norm), Proposals._normalisation),
}
