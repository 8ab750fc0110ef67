r"""Probes of a few groups of layers at a time, which do not see the coupling between groups.

A linear function of A's diagonal needs no coupling of two layers, but a probe of all layers sees every one, as noise. With one
probe v_g on each group g of layers instead,

.. math:: \mathbb E \sum_g v_g \circ A v_g = \operatorname{diag} A, \qquad
    \operatorname{Var} \sum_g v_g^\top A v_g \le 2 \sum_g \|A_{gg}\|_F^2,

at one product a group: v is a probe of A's block diagonal (:class:`~flatminima.operators.composites.BlockDiagonal`). In networks
most of ‖A‖_F² is couplings of a few pairs of layers (those of a transformer's block, and each with the head); three groups in
which none of these pairs stands together leave little of it. One product with a probe of each layer tells them:
E ‖A_ij v_j‖² = ‖A_ij‖_F². Layers with the same place in repeated blocks count as one.

Probing vectors for a known sparsity pattern are Tang & Saad's (2012, *A probing method for computing the diagonal of a matrix
inverse*); that the pattern is that of layers, and measured, is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from flatminima.operators.base import LinearOperator

__all__ = ["Couplings", "Grouping", "Layer", "expanded", "only", "roles", "squares_by_block"]

#: Names of the blocks that belong together.
Layer = tuple[str, ...]


def only(A: LinearOperator, X: Tensor, layers: Sequence[Layer]) -> Tensor:
    """Return X ``(n, b)`` with all rows outside the layers set to 0."""
    result = torch.zeros_like(X)
    for layer in layers:
        for name in layer:
            rows = A.blocks[name]
            result[rows] = X[rows]
    return result


def expanded(A: LinearOperator, V: Tensor, layers: Sequence[Layer]) -> Tensor:
    """Return V ``(n, b)`` restricted to each layer in turn, ``(n, L·b)``."""
    return torch.cat([only(A, V, [layer]) for layer in layers], dim=1)


def roles(A: LinearOperator) -> tuple[Layer, ...]:
    """Return A's blocks, put together by module, and the modules by their place where numbered ones repeat it.

    ``layers.0.mlp.2`` and ``layers.1.mlp.2`` have one place, ``layers.*.mlp.2``; ``0`` and ``2`` of a plain sequence have two.
    """
    modules: dict[str, list[str]] = {}
    for name in A.blocks:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    places: dict[str, list[str]] = {}
    for module, place in zip(modules, _places(list(modules)), strict=True):
        places.setdefault(place, []).extend(modules[module])
    return tuple(tuple(names) for names in places.values())


def _places(names: list[str]) -> list[str]:
    """Return the names with ``*`` for every number that others with the same parts before and after it differ in."""
    parts = [name.split(".") for name in names]
    for position in range(max(map(len, parts), default=0)):
        numbers: dict[tuple[tuple[str, ...], tuple[str, ...]], int] = {}
        keys = [(tuple(part[:position]), tuple(part[position + 1 :])) for part in parts]
        inner = [len(part) > position + 1 and part[position].isdigit() for part in parts]
        for key, is_inner in zip(keys, inner, strict=True):
            numbers[key] = numbers.get(key, 0) + is_inner
        for part, key, is_inner in zip(parts, keys, inner, strict=True):
            if is_inner and numbers[key] > 1:
                part[position] = "*"
    return [".".join(part) for part in parts]


@final
@dataclass(frozen=True, eq=False)
class Couplings:
    """How strongly layers are coupled.

    Attributes:
        layers: The layers.
        blocks: Names of all of A's blocks, in their order.
        squares: Estimates of ‖A_bj‖_F² for block b and layer j, ``(B, L)``, float64 on the CPU.
    """

    layers: tuple[Layer, ...]
    blocks: tuple[str, ...]
    squares: Tensor

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The layer of each block, −1 for none."""
        layer_of = {name: i for i, layer in enumerate(self.layers) for name in layer}
        return tuple(layer_of.get(name, -1) for name in self.blocks)

    def cheapest(self, price: Callable[[Tensor, int], float]) -> Grouping:
        """Return the cheapest of the groupings that merging the least coupled two, again and again, goes through.

        Args:
            price: From ``Grouping.within`` and the number of groups.
        """
        groups = [[i] for i in range(len(self.layers))]
        W = torch.zeros(len(groups), len(groups), dtype=torch.float64)
        for owner, row in zip(self.owners, self.squares, strict=True):
            if owner >= 0:
                W[owner] += row
        W = (W + W.T).fill_diagonal_(torch.inf)
        best, cheapest = groups, price(self._within(groups), len(groups))
        while len(groups) > 1:
            a, b = sorted(divmod(int(W.argmin()), len(groups)))
            W[a] += W[b]
            W[:, a] += W[:, b]
            kept = [i for i in range(len(groups)) if i != b]
            W = W[kept][:, kept]
            groups = [groups[i] + groups[b] if i == a else groups[i] for i in kept]
            own = price(self._within(groups), len(groups))
            if own <= cheapest:
                best, cheapest = groups, own
        names = tuple(tuple(name for i in group for name in self.layers[i]) for group in best)
        return Grouping(names, self._within(best), cheapest)

    def _within(self, groups: Sequence[Sequence[int]]) -> Tensor:
        own = {i: list(group) for group in groups for i in group}
        sums = [
            row[own[owner]].sum() if owner >= 0 else row.new_zeros(())
            for owner, row in zip(self.owners, self.squares, strict=True)
        ]
        return torch.stack(sums)


@final
@dataclass(frozen=True, eq=False)
class Grouping:
    """Groups of layers.

    Attributes:
        layers: The layers of each group as one.
        within: Σ ‖A_bj‖_F² over the layers j in the group of block b, ``(B,)``: what a probe of the group sees.
        price: Of sampling by them.
    """

    layers: tuple[Layer, ...]
    within: Tensor
    price: float


def squares_by_block(A: LinearOperator, products: Tensor) -> Tensor:
    """Return the squared lengths of each block's rows of the products ``(n, b)``, ``(B, b)`` in float64 on the CPU."""
    return torch.stack([products[rows].square().sum(0, dtype=torch.float64) for rows in A.blocks.values()]).cpu()
