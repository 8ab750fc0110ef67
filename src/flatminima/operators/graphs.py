"""What an operator makes of a piece of the data before it can multiply, and may keep between products.

One product takes a forward pass, a backward pass whose graph is kept, and a pass through that graph for every column. In a run
of products at one point only the last part differs, so the first parts can stay in memory, if they fit there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flatminima.objective import Piece
from flatminima.objective.batches import tensors_of

__all__ = ["PieceProducts", "Route", "held_bytes"]


class PieceProducts(ABC):
    """One piece's part of the products with a matrix."""

    @property
    def roots(self) -> Sequence[Tensor]:
        """The tensors whose graphs are held from one product to the next."""
        return ()

    @abstractmethod
    def products(self, V: Tensor) -> Tensor:
        """Return the piece's part of A V for V ``(n, k)``, detached; what is held stays as it is."""


#: A way to multiply: makes of a piece what can. It is called within a session.
Route = Callable[[Piece], PieceProducts]


def held_bytes(roots: Sequence[Tensor], batch: Any = None) -> dict[int, int]:
    """Return the bytes of each storage that the graphs behind ``roots`` and a batch hold, by its address."""
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(batch)}
    while stack:
        node = stack.pop()
        for tensor in _saved(node):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return storages


def _saved(node: torch.autograd.graph.Node) -> Iterator[Tensor]:
    names = _SAVED_NAMES.setdefault(type(node), [n for n in dir(node) if n.startswith("_saved_")])
    for name in names:
        value = getattr(node, name)
        yield from (v for v in (value if isinstance(value, tuple | list) else (value,)) if isinstance(v, Tensor))
    yield from (v for v in getattr(node, "saved_tensors", ()) if isinstance(v, Tensor))


_SAVED_NAMES: dict[type, list[str]] = {}
