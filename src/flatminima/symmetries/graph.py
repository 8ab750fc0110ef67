"""Trace a model into a list of ATen operations with ``torch.export``, and go through them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from flatminima.objective.session import copied
from flatminima.params import clean_name
from flatminima.symmetries.inputs import Call
from flatminima.symmetries.move import Layout
from flatminima.symmetries.quiet import quietly
from flatminima.symmetries.values import Activation, BufferRef, ParameterView, Value

__all__ = ["Graph", "Operation", "TraceFailed", "interpret", "leaves", "node_shapes", "one_line", "trace"]


class TraceFailed(Exception):
    """The model has no static graph; the message says why, in one line."""


@dataclass(frozen=True)
class Graph:
    """A traced model.

    Attributes:
        nodes: ``torch.fx`` nodes in the order of computation.
        parameters: Name of the parameter that a placeholder stands for; a tied parameter goes under its first name.
        buffers: The same for buffers.
        inputs: Names of the placeholders that are the network's inputs.
    """

    nodes: tuple[torch.fx.Node, ...]
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    inputs: frozenset[str]


@dataclass(frozen=True)
class Operation:
    """One ATen operation with its arguments by name.

    Attributes:
        name: Name without namespace, overload and the in-place underscore ("relu" for ``aten::relu_``).
        target: The overload itself, for running it on unit ids.
        arguments: Traced values and Python constants by the schema's argument names.
        out: Shape of the result, or a tuple of shapes.
        mutates: Whether it writes into an argument.
    """

    name: str
    target: Any
    arguments: Mapping[str, Value]
    out: Any
    mutates: bool

    def __getitem__(self, argument: str) -> Any:
        return self.arguments.get(argument)

    def values(self) -> list[Value]:
        """Return all arguments, lists of tensors opened."""
        return [v for a in self.arguments.values() for v in (a if isinstance(a, list | tuple) else [a])]

    def tensors(self) -> list[Value]:
        """Return the traced tensors among the arguments."""
        return [v for v in self.values() if isinstance(v, Activation | ParameterView | BufferRef)]


def trace(model: nn.Module, call: Call) -> Graph:
    """Trace ``model``, which is in eval mode and is not changed, on the inputs of ``call``.

    Raises:
        TraceFailed: If ``torch.export`` cannot trace it (control flow on data, unsupported objects).
    """
    names = Layout.of(model)
    with quietly():
        try:
            program = torch.export.export(copied(model), call.args, dict(call.kwargs), strict=False)
        except Exception as error:  # torch.export raises many types; each means that there is no graph
            raise TraceFailed(one_line(error)) from error
    parameters, buffers, inputs = {}, {}, set()
    for spec in program.graph_signature.input_specs:
        placeholder, target = str(getattr(spec.arg, "name", "")), clean_name(str(spec.target))
        if spec.kind.name == "PARAMETER":
            parameters[placeholder] = names.name(target)
        elif spec.kind.name == "BUFFER":
            buffers[placeholder] = names.name(target)
        elif spec.kind.name == "USER_INPUT":
            inputs.add(placeholder)
    return Graph(tuple(program.graph.nodes), MappingProxyType(parameters), MappingProxyType(buffers), frozenset(inputs))


def interpret(graph: Graph, leaf: Callable[[torch.fx.Node], Value], result: Callable[[Operation], Value]) -> Value:
    """Go through a graph in the order of computation with any values in place of its tensors.

    Args:
        graph: The traced model.
        leaf: Gives the value of a placeholder, or of any other node that computes nothing.
        result: Gives the value of an operation on values, or a tuple of them.

    Returns:
        The values in place of the model's outputs.
    """
    values: dict[torch.fx.Node, Value] = {}
    for node in graph.nodes:
        args, kwargs = _resolved(node.args, values), _resolved(node.kwargs, values)
        if node.op == "output":
            return args
        if node.op != "call_function":
            values[node] = leaf(node)
        elif node.target is operator.getitem and isinstance(args[0], tuple):
            values[node] = args[0][args[1]]
        else:
            values[node] = result(_operation(node, args, kwargs))
    return ()


def _resolved(argument: Any, values: Mapping[torch.fx.Node, Value]) -> Any:
    """Return an argument with the traced values in place of the nodes."""
    if isinstance(argument, torch.fx.Node):
        return values[argument]
    if isinstance(argument, Mapping):
        return {key: _resolved(value, values) for key, value in argument.items()}
    if isinstance(argument, list | tuple) and not isinstance(argument, torch.Size):
        return tuple(_resolved(value, values) for value in argument)
    return argument


def _operation(node: torch.fx.Node, args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> Operation:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        named = {f"arg{i}": value for i, value in enumerate(args)} | dict(kwargs)
        return Operation(getattr(target, "__name__", str(target)), target, named, node_shapes(node), True)
    schema = target._schema
    named = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    named |= {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    name = schema.name.split("::")[-1]
    return Operation(name.removesuffix("_"), target, named, node_shapes(node), schema.is_mutable)


def leaves(value: Value) -> list[Value]:
    """Return the values in nested dicts, lists and tuples."""
    if isinstance(value, Mapping):
        return [leaf for v in value.values() for leaf in leaves(v)]
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [leaf for v in value for leaf in leaves(v)]
    return [value]


def one_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def node_shapes(node: torch.fx.Node) -> Any:
    """Return the shape of a node's result, or a tuple of shapes (None where an element is not a tensor)."""
    return _shape(node.meta.get("val"))


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.Size(int(s) for s in value.shape)
    if isinstance(value, list | tuple):
        return tuple(_shape(v) for v in value)
    return None
