"""Units: the things that a symmetry scales or reorders, and what the operations of a network say about them.

Every layer gives a *block* of new units, one per output feature or channel. An operation can demand that two units share
one scale (a sum), that a unit keeps its scale (tanh), that two units are reordered together (a depthwise convolution), or that
two units cannot be exchanged (they feed different layers). Unit 0 stands for everything fixed: inputs, outputs, constants.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["FIXED", "Block", "IntArray", "Relation", "UnitTable"]

FIXED = 0
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """The units that one layer makes: ids ``start`` to ``start + size − 1``, named by the layer."""

    name: str
    start: int
    size: int

    @property
    def ids(self) -> Tensor:
        """Unit ids, shape ``(size,)``."""
        return torch.arange(self.start, self.start + self.size)


class Relation:
    """An equivalence relation on units, gathered pair by pair."""

    def __init__(self) -> None:
        self._left: list[Tensor] = []
        self._right: list[Tensor] = []

    def tie(self, a: Tensor, b: Tensor) -> None:
        """Declare units equivalent, entry by entry of two broadcastable id tensors."""
        left, right = torch.broadcast_tensors(a, b)
        pairs = torch.stack((left.reshape(-1), right.reshape(-1)), dim=1)
        pairs = pairs[pairs[:, 0] != pairs[:, 1]].unique(dim=0)
        self._left.append(pairs[:, 0])
        self._right.append(pairs[:, 1])

    def fix(self, ids: Tensor) -> None:
        """Declare units equivalent to the fixed unit."""
        self.tie(ids, torch.zeros(1, dtype=torch.int64))

    def classes(self, num_units: int) -> IntArray:
        """Return the class of every unit, shape ``(num_units,)``; class 0 is that of the fixed unit."""
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import connected_components

        left = torch.cat([torch.zeros(1, dtype=torch.int64), *self._left]).numpy()
        right = torch.cat([torch.zeros(1, dtype=torch.int64), *self._right]).numpy()
        graph = coo_matrix((np.ones(len(left)), (left, right)), shape=(num_units, num_units))
        labels: IntArray = connected_components(graph, directed=False)[1].astype(np.int64)
        if labels[FIXED] != 0:
            labels = np.where(labels == 0, labels[FIXED], np.where(labels == labels[FIXED], 0, labels))
        return labels


@dataclass(frozen=True)
class Reuse:
    """A tensor that is read a second time: the scales of its entries' units must agree in sum, exponents as signs.

    Attributes:
        name: Name of the tensor.
        pairs: For each of its terms, the unit ids of the first and of this use.
    """

    name: str
    pairs: tuple[tuple[Tensor, Tensor], ...]


class UnitTable:
    """All units of a network, with the two relations on them.

    Attributes:
        scale: Units that must be multiplied by one and the same number.
        order: Units that must be moved together by a permutation.
        blocks: The layers' outputs, in the order in which they are computed.
    """

    def __init__(self) -> None:
        self.scale = Relation()
        self.order = Relation()
        self.blocks: list[Block] = []
        self.colours: IntArray = np.zeros(1, dtype=np.int64)
        self._next_colour = 1

    def __len__(self) -> int:
        return len(self.colours)

    def new_block(self, name: str, size: int) -> Tensor:
        """Make ``size`` new units and return their ids ``(size,)``."""
        block = Block(name, len(self), size)
        self.blocks.append(block)
        self.colours = np.concatenate((self.colours, np.zeros(size, dtype=np.int64)))
        return block.ids

    def fix(self, ids: Tensor) -> None:
        """Fix units for scaling and for reordering."""
        self.scale.fix(ids)
        self.order.fix(ids)

    def tie(self, a: Tensor, b: Tensor) -> None:
        """Tie units for scaling and for reordering."""
        self.scale.tie(a, b)
        self.order.tie(a, b)

    def distinguish(self, ids: Tensor) -> None:
        """Note that an operation reads these units: they are no longer exchangeable with units that it does not read as often."""
        units, counts = np.unique(ids.reshape(-1).numpy(), return_counts=True)
        pairs = np.stack((self.colours[units], counts), axis=1)
        distinct, colour = np.unique(pairs, axis=0, return_inverse=True)
        self.colours[units] = self._next_colour + colour.reshape(-1)
        self._next_colour += len(distinct)
