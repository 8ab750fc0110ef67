"""The walk over a traced graph: every tensor gets unit ids, every parameter entry the units that it follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flatminima.symmetries.graph import Graph, Operation, interpret, leaves, node_shapes
from flatminima.symmetries.settle import settle
from flatminima.symmetries.units import Reuse, UnitTable
from flatminima.symmetries.values import Activation, Affine, BufferRef, ParameterView, Term, Value, fixed_activation

__all__ = ["Absorption", "Operation", "Rule", "Walk", "walk"]


#: Gives the result of an operation, or None where it does not cover these arguments.
Rule = Callable[["Walk", Operation], Value]


@dataclass(frozen=True)
class Absorption:
    """A normalisation with fixed statistics: it undoes any scale c of its input if mean ← c·mean, var ← c²(var + eps) − eps.

    Attributes:
        mean: Name of the buffer with the running means, shape ``(channels,)``.
        var: Name of the buffer with the running variances.
        eps: Number added to the variance.
        ids: Unit of every channel of the input, shape ``(channels,)``.
    """

    mean: str
    var: str
    eps: float
    ids: Tensor


@dataclass
class Walk:
    """What is known after a walk over the graph.

    Attributes:
        units: All units and their relations.
        terms: Terms of every parameter and buffer that some operation used, by name.
        absorptions: The normalisations with fixed statistics.
        notes: What was not covered, and how often it was met.
        num_uses: How often each parameter and buffer is read.
        reuses: What is read more than once in the same role; settled after the walk.
        normalisations: Operations that undo a common scale of their input, by name, with the unit ids of the input.
        not_moved: Layers and parameters whose rescalings a note says are not moved along.
        output: The network's output, if it is one tensor.
    """

    units: UnitTable = field(default_factory=UnitTable)
    terms: dict[str, tuple[Term, ...]] = field(default_factory=dict)
    absorptions: list[Absorption] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    num_uses: Counter[str] = field(default_factory=Counter)
    reuses: list[Reuse] = field(default_factory=list)
    normalisations: list[tuple[str, Tensor]] = field(default_factory=list)
    not_moved: set[str] = field(default_factory=set)
    output: Activation | None = None

    def use(self, name: str, *terms: Term) -> None:
        """Record that an operation reads a parameter or buffer in a role; without terms, in a role that fixes its entries.

        A tensor that is read twice in the same role ties the units of both places; in two different roles it fixes them.
        """
        self.num_uses[name] += 1
        before = self.terms.setdefault(name, terms)
        if self.num_uses[name] == 1:
            return
        if [_form(t) for t in before] == [_form(t) for t in terms]:
            pairs = tuple(zip(before, terms, strict=True))
            for old, new in pairs:
                self.units.order.tie(old.ids, new.ids)
            self.reuses.append(Reuse(name, tuple((old.ids, new.ids) for old, new in pairs if old.exponent)))
        else:
            self.notes[f"{name} is used in different roles: the units that it touches are fixed"] += 1
            for term in (*before, *terms):
                self.units.fix(term.ids)

    def contract(
        self,
        op: Operation,
        x: Activation,
        x_axis: int,
        weight: ParameterView,
        bias: ParameterView | None,
        *,
        out_axis: int,
        in_axis: int,
        groups: int = 1,
    ) -> Activation | None:
        """Record a layer that sums over ``x_axis``: y_o = Σ_i weight[o, i] x_i + bias_o, within ``groups`` of channels."""
        in_ids = x.ids_along(x_axis)
        if in_ids is None:
            return None
        name = weight.name.removesuffix(".weight")
        num_out = weight.shape[out_axis]
        ids = self.units.new_block(name, num_out)
        out_term = weight.term(ids, out_axis, +1)
        if groups == 1:
            in_term = weight.term(in_ids, in_axis, -1)
        elif weight.shape[in_axis] == 1:
            in_ids = in_ids.repeat_interleave(num_out // groups)
            in_term = weight.term(in_ids, out_axis, -1, moves=False)
            self.units.order.tie(ids, in_ids)
        else:
            in_term = self._grouped_in_term(weight, in_ids, ids, out_axis, in_axis, groups)
        self.use(weight.name, out_term, in_term)
        if bias is not None:
            self.use(bias.name, bias.term(ids, 0, +1))
        shape = [1] * len(op.out)
        shape[x_axis] = num_out
        affine = Affine(weight.name, weight.dims[out_axis], bias.name if bias else None, ids) if groups == 1 else None
        return Activation(ids.reshape(shape), op.out, affine)

    def absorb(self, absorption: Absorption) -> None:
        """Record a normalisation; one whose statistics are used twice ties the scales of its inputs."""
        for other in self.absorptions:
            if other.var == absorption.var:
                self.units.scale.tie(other.ids, absorption.ids)
        self.absorptions.append(absorption)

    def _grouped_in_term(
        self, weight: ParameterView, in_ids: Tensor, ids: Tensor, out_axis: int, in_axis: int, groups: int
    ) -> Term:
        """Return the in-term of a grouped layer; channels of different groups are not exchangeable."""
        by_group = in_ids.reshape(groups, -1)
        for in_group, out_group in zip(by_group, ids.reshape(groups, -1), strict=True):
            self.units.distinguish(in_group)
            self.units.distinguish(out_group)
        table = by_group.repeat_interleave(ids.numel() // groups, dim=0)  # (out, in / groups)
        shape = [1] * len(weight.shape)
        shape[out_axis], shape[in_axis] = table.shape
        table = (table if out_axis < in_axis else table.T).reshape(shape)
        return Term(weight.to_parameter_axes(table), -1, weight.dims[in_axis])

    def unknown(self, op: Operation, note: str | None = None) -> Value:
        """Fix every unit that an operation touches, and say so; its results count as inputs."""
        touched = False
        for value in op.tensors():
            if isinstance(value, Activation) and not value.is_fixed():
                self.units.fix(value.ids)
                touched = True
            elif isinstance(value, ParameterView | BufferRef):
                self.use(value.name)
                touched = touched or isinstance(value, ParameterView)
        if touched:
            self.notes[note or f"{op.name} is not covered here: the units that it touches are fixed"] += 1
        return _fixed(op.out)

    def normalises(self, op: Operation, ids: Tensor) -> None:
        """Record an operation that is unchanged when all its input is scaled, and that mixes its units."""
        if bool(ids.any()):
            self.normalisations.append((op.name, ids))

    def not_homogeneous(self, op: Operation, ids: Tensor) -> None:
        """Fix the scale of the units that pass through a function without f(s x) = s f(x)."""
        if bool(ids.any()):
            self.units.scale.fix(ids)
            self.notes[f"{op.name} is not positively homogeneous: no rescaling"] += 1


def walk(graph: Graph, rule_for: Callable[[Operation], Rule]) -> Walk:
    """Walk over a graph in the order of computation, with one rule for every operation."""
    state = Walk()
    _finish(state, interpret(graph, lambda node: _leaf(node, graph), lambda op: _result(state, op, rule_for)))
    notes, state.not_moved = settle(state.units, state.normalisations, state.reuses)
    state.notes.update(notes)
    return state


def _leaf(node: torch.fx.Node, graph: Graph) -> Value:
    shape = node_shapes(node)
    if node.op == "placeholder" and isinstance(shape, torch.Size):
        if node.name in graph.parameters:
            return ParameterView(graph.parameters[node.name], shape, tuple(range(len(shape))))
        if node.name in graph.buffers:
            return BufferRef(graph.buffers[node.name], shape)
        return fixed_activation(shape)
    return None


def _result(state: Walk, op: Operation, rule_for: Callable[[Operation], Rule]) -> Value:
    tensors = op.tensors()
    for value in tensors:
        if isinstance(value, Activation):
            state.units.distinguish(value.ids)
    if not any(isinstance(v, ParameterView) or (isinstance(v, Activation) and not v.is_fixed()) for v in tensors):
        return state.unknown(op)
    result = rule_for(op)(state, op)
    return state.unknown(op) if result is None else result


def _finish(state: Walk, result: Value) -> None:
    found = leaves(result)
    for leaf in found:
        if isinstance(leaf, Activation):
            state.units.fix(leaf.ids)
        elif isinstance(leaf, ParameterView | BufferRef):
            state.use(leaf.name)
    activations = [leaf for leaf in found if isinstance(leaf, Activation)]
    state.output = activations[0] if len(activations) == 1 else None


def _fixed(shape: Any) -> Value:
    if isinstance(shape, torch.Size):
        return fixed_activation(shape)
    return tuple(_fixed(s) for s in shape) if isinstance(shape, tuple) else None


def _form(term: Term) -> tuple[Any, ...]:
    return term.exponent, term.axis, term.ids.shape
