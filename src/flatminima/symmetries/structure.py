"""From the walk's relations to the groups: which units are free, which layers they form, which can be exchanged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flatminima.symmetries.units import IntArray, UnitTable
from flatminima.symmetries.values import Term
from flatminima.symmetries.walk import Walk

__all__ = ["ScaleVariables", "exchangeable_cells", "scale_variables"]

_NONE = -1


@dataclass(frozen=True)
class ScaleVariables:
    """Units numbered by the free log-scale that they follow.

    Attributes:
        of_unit: Number of the variable of every unit, −1 for a unit that does not scale; shape ``(units,)``.
        labels: Name of each variable, by the first unit that follows it.
        layers: Number of the layer of each variable, in the order of computation; shape ``(variables,)``.
    """

    of_unit: IntArray
    labels: tuple[str, ...]
    layers: IntArray

    def __len__(self) -> int:
        return len(self.labels)

    def of(self, ids: Tensor) -> Tensor:
        """Return the variables of unit ids, in the same shape."""
        return torch.from_numpy(self.of_unit)[ids]


def scale_variables(walk: Walk) -> tuple[ScaleVariables, ScaleVariables, ScaleVariables]:
    """Return the variables of layer rescaling, of node rescaling, and of the units whose scale a normalisation absorbs."""
    units = walk.units
    classes = units.scale.classes(len(units))
    num_classes = int(classes.max()) + 1
    scales_something = np.zeros(num_classes, dtype=bool)
    for terms in walk.terms.values():
        for term in terms:
            if term.exponent:
                scales_something[classes[term.ids.reshape(-1).numpy()]] = True
    absorbed = np.zeros(num_classes, dtype=bool)
    for absorption in walk.absorptions:
        absorbed[classes[absorption.ids.numpy()]] = True
    free = scales_something
    free[0] = False
    node = _node_variables(units, classes, free & ~absorbed)
    return _layer_variables(units, node), node, _node_variables(units, classes, free & absorbed)


def _node_variables(units: UnitTable, classes: IntArray, chosen: np.ndarray) -> ScaleVariables:
    number = np.full(len(chosen), _NONE, dtype=np.int64)
    number[chosen] = np.arange(int(chosen.sum()))
    of_unit = number[classes]
    labels, layers = [""] * int(chosen.sum()), np.zeros(int(chosen.sum()), dtype=np.int64)
    for position, block in reversed(list(enumerate(units.blocks))):
        for k in range(block.size):
            variable = of_unit[block.start + k]
            if variable != _NONE:
                labels[variable], layers[variable] = f"{block.name}[{k}]", position
    return ScaleVariables(of_unit, tuple(labels), layers)


def _layer_variables(units: UnitTable, node: ScaleVariables) -> ScaleVariables:
    """One variable for all units of a block, and of the blocks that share a unit's scale with it, if all of them are free."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    num_blocks = len(units.blocks)
    block_of_unit = np.zeros(len(units), dtype=np.int64)
    for position, block in enumerate(units.blocks):
        block_of_unit[block.start : block.start + block.size] = position
    scaled = np.flatnonzero(node.of_unit != _NONE)
    size = num_blocks + len(node)
    edges = (np.ones(len(scaled)), (block_of_unit[scaled], num_blocks + node.of_unit[scaled]))
    component = connected_components(coo_matrix(edges, shape=(size, size)), directed=False)[1][:num_blocks]
    is_free = np.ones(size, dtype=bool)
    bound = np.flatnonzero(node.of_unit[1:] == _NONE) + 1
    is_free[component[block_of_unit[bound]]] = False
    number: dict[int, int] = {}
    of_unit = np.full(len(units), _NONE, dtype=np.int64)
    labels: list[str] = []
    layers: list[int] = []
    for position, block in enumerate(units.blocks):
        group = int(component[position])
        if is_free[group] and block.size:
            if group not in number:
                number[group] = len(labels)
                labels.append(block.name)
                layers.append(position)
            of_unit[block.start : block.start + block.size] = number[group]
    return ScaleVariables(of_unit, tuple(labels), np.array(layers, dtype=np.int64))


def exchangeable_cells(walk: Walk) -> list[IntArray]:
    """Return the sets of units that any permutation may reorder.

    Units that move together (a sum, a depthwise convolution) are one row of a cell; each column holds one role, and a
    permutation of the rows is applied to every column. So a cell has shape ``(rows, roles)``, with at least two rows.
    """
    units = walk.units
    classes = units.order.classes(len(units))
    moves = np.zeros(len(units), dtype=bool)
    for terms in walk.terms.values():
        for term in terms:
            if term.axis is not None:
                moves[term.ids.reshape(-1).numpy()] = True
    block_of_unit = np.zeros(len(units), dtype=np.int64)
    for position, block in enumerate(units.blocks):
        block_of_unit[block.start : block.start + block.size] = position
    members: dict[int, list[int]] = {}
    for unit in range(1, len(units)):
        if classes[unit] != 0:
            members.setdefault(int(classes[unit]), []).append(unit)
    rows: dict[tuple[tuple[int, int], ...], list[list[int]]] = {}
    for row in members.values():
        if moves[row].any():
            signature = tuple((int(block_of_unit[u]), int(units.colours[u])) for u in row)
            rows.setdefault(signature, []).append(row)
    return [np.array(cell, dtype=np.int64) for cell in rows.values() if len(cell) > 1]


def is_scaled(term: Term, variables: ScaleVariables) -> bool:
    """Return whether a term follows at least one variable."""
    return bool(term.exponent) and bool((variables.of(term.ids) != _NONE).any())
