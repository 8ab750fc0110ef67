"""Trace a model into a list of ATen operations with ``torch.export``."""

from __future__ import annotations

from collections.abc import Mapping
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

__all__ = ["Graph", "TraceFailed", "node_shapes", "one_line", "trace"]


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
