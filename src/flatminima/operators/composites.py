"""Matrices made of others: sums, multiples, shifts, congruences, blocks and compressions, none of them formed."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import final

import torch
from torch import Tensor

from flatminima._checks import check_shape
from flatminima.operators.base import DEFAULT_GRAPH_BYTES, LinearOperator

__all__ = ["Block", "BlockDiagonal", "Congruence", "Projection", "Scaled", "Shifted", "Sum"]


class Wrapper(LinearOperator, ABC):
    """An operator made of another one; of the same size, unless it says otherwise."""

    def __init__(self, inner: LinearOperator) -> None:
        self.inner = inner

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def blocks(self) -> Mapping[str, slice]:
        return self.inner.blocks

    def keeping_graphs(self, max_bytes: int = DEFAULT_GRAPH_BYTES) -> AbstractContextManager[None]:
        return self.inner.keeping_graphs(max_bytes)

    def _names_of(self, pick: object) -> tuple[str, ...]:
        return self.inner._names_of(pick)


@final
class Sum(Wrapper):
    """A + B."""

    def __init__(self, inner: LinearOperator, other: LinearOperator) -> None:
        if inner.shape != other.shape or inner.dtype != other.dtype or inner.device != other.device:
            raise ValueError(
                "Summands must agree in shape, dtype and device. "
                f"Got {inner.shape} {inner.dtype} {inner.device} and {other.shape} {other.dtype} {other.device}."
            )
        super().__init__(inner)
        self.other = other

    @contextmanager
    def keeping_graphs(self, max_bytes: int = DEFAULT_GRAPH_BYTES) -> Iterator[None]:
        with self.inner.keeping_graphs(max_bytes // 2), self.other.keeping_graphs(max_bytes // 2):
            yield

    def _matmat(self, V: Tensor) -> Tensor:
        return self.inner._matmat(V) + self.other._matmat(V)

    def _restricted(self, names: Sequence[str]) -> LinearOperator | None:
        if tuple(self.inner.blocks.items()) != tuple(self.other.blocks.items()):
            return None
        return Sum(Block(self.inner, names), Block(self.other, names))


@final
class Scaled(Wrapper):
    """c A for a number c."""

    def __init__(self, inner: LinearOperator, factor: float) -> None:
        super().__init__(inner)
        self.factor = factor

    def _matmat(self, V: Tensor) -> Tensor:
        return self.factor * self.inner._matmat(V)

    def with_inner(self, inner: LinearOperator) -> Scaled:
        return Scaled(inner, self.factor)

    def _restricted(self, names: Sequence[str]) -> LinearOperator:
        return Scaled(Block(self.inner, names), self.factor)


@final
class Shifted(Wrapper):
    """A + c I for a number c."""

    def __init__(self, inner: LinearOperator, shift: float) -> None:
        super().__init__(inner)
        self.shift_by = shift

    def _matmat(self, V: Tensor) -> Tensor:
        return self.inner._matmat(V) + self.shift_by * V

    def with_inner(self, inner: LinearOperator) -> Shifted:
        return Shifted(inner, self.shift_by)

    def _restricted(self, names: Sequence[str]) -> LinearOperator:
        return Shifted(Block(self.inner, names), self.shift_by)


@final
class Congruence(Wrapper):
    """D A D with D = diag(d)."""

    def __init__(self, inner: LinearOperator, d: Tensor) -> None:
        super().__init__(inner)
        self.d = check_shape("d", d, (inner.size,), "one factor per row").detach().to(inner.device, inner.dtype)

    def _matmat(self, V: Tensor) -> Tensor:
        return self.d[:, None] * self.inner._matmat(self.d[:, None] * V)

    def with_inner(self, inner: LinearOperator) -> Congruence:
        return Congruence(inner, self.d)

    def _restricted(self, names: Sequence[str]) -> LinearOperator:
        block = Block(self.inner, names)
        return Congruence(block, self.d[block.indices])


@final
class Block(Wrapper):
    """The rows and columns of some of an operator's blocks.

    Where the operator can restrict itself, only these rows and columns are computed; else its whole product is, of a vector
    that is zero elsewhere.
    """

    def __init__(self, inner: LinearOperator, names: Sequence[str]) -> None:
        super().__init__(inner)
        self.names = tuple(names)
        ranges = [inner.blocks[name] for name in names]
        self.indices = torch.cat([torch.arange(r.start, r.stop, device=inner.device) for r in ranges])
        blocks, start = {}, 0
        for name, r in zip(names, ranges, strict=True):
            blocks[name] = slice(start, start + r.stop - r.start)
            start = blocks[name].stop
        self._own_blocks = MappingProxyType(blocks)
        #: The same block as an operator that computes nothing else, or None.
        self.direct = inner._restricted(self.names)

    @property
    def size(self) -> int:
        return self.indices.numel()

    @property
    def blocks(self) -> Mapping[str, slice]:
        return self._own_blocks

    def keeping_graphs(self, max_bytes: int = DEFAULT_GRAPH_BYTES) -> AbstractContextManager[None]:
        return (self.inner if self.direct is None else self.direct).keeping_graphs(max_bytes)

    def _matmat(self, V: Tensor) -> Tensor:
        if self.direct is not None:
            return self.direct._matmat(V)
        padded = torch.zeros(self.inner.size, V.shape[1], dtype=self.dtype, device=self.device)
        padded[self.indices] = V
        return self.inner._matmat(padded)[self.indices]

    def with_inner(self, inner: LinearOperator) -> Block:
        return Block(inner, self.names)

    def _restricted(self, names: Sequence[str]) -> LinearOperator:
        return Block(self.inner, names)


@final
class BlockDiagonal(Wrapper):
    """The diagonal blocks of an operator in their places, and zeros elsewhere."""

    def __init__(self, inner: LinearOperator, groups: Iterable[Sequence[str]]) -> None:
        super().__init__(inner)
        self.groups = tuple(tuple(names) for names in groups)
        self.parts = tuple(Block(inner, names) for names in self.groups)

    @contextmanager
    def keeping_graphs(self, max_bytes: int = DEFAULT_GRAPH_BYTES) -> Iterator[None]:
        with self._kept(self.parts, max_bytes // len(self.parts)):
            yield

    @contextmanager
    def _kept(self, parts: Sequence[LinearOperator], max_bytes: int) -> Iterator[None]:
        if not parts:
            yield
            return
        with parts[0].keeping_graphs(max_bytes), self._kept(parts[1:], max_bytes):
            yield

    def _matmat(self, V: Tensor) -> Tensor:
        result = torch.zeros_like(V)
        for part in self.parts:
            result[part.indices] = part._matmat(V[part.indices])
        return result

    def with_inner(self, inner: LinearOperator) -> BlockDiagonal:
        return BlockDiagonal(inner, self.groups)

    def _restricted(self, names: Sequence[str]) -> LinearOperator:
        kept = ([name for name in group if name in set(names)] for group in self.groups)
        return BlockDiagonal(Block(self.inner, names), [group for group in kept if group])


@final
class Projection(Wrapper):
    """Qᵀ A Q for orthonormal columns Q: what A does within their span."""

    def __init__(self, inner: LinearOperator, Q: Tensor) -> None:
        super().__init__(inner)
        if not isinstance(Q, Tensor):
            raise TypeError(f"`Q` must be a tensor of shape ({inner.size}, k). Got {type(Q).__name__}.")
        if Q.ndim != 2 or Q.shape[0] != inner.size or not 1 <= Q.shape[1] <= inner.size:
            raise ValueError(f"`Q` must have shape ({inner.size}, k) with 1 <= k <= {inner.size}. Got {tuple(Q.shape)}.")
        if Q.dtype != inner.dtype or Q.device != inner.device:
            raise ValueError(
                f"`Q` must be {inner.dtype} on {inner.device}. Got {Q.dtype} on {Q.device}. Call Q.to(A.device, A.dtype)."
            )
        error = (Q.T @ Q - torch.eye(Q.shape[1], dtype=Q.dtype, device=Q.device)).abs().max()
        if not error <= 1e3 * torch.finfo(Q.dtype).eps:
            raise ValueError(
                "`Q` must have orthonormal columns (QᵀAQ is a compression only then). "
                f"Got QᵀQ that differs from the identity by {float(error):.2g}. Take torch.linalg.qr(Q).Q."
            )
        self.Q = Q.detach()

    @property
    def size(self) -> int:
        return self.Q.shape[1]

    @property
    def blocks(self) -> Mapping[str, slice]:
        return MappingProxyType({"all": slice(0, self.size)})

    def _names_of(self, pick: object) -> tuple[str, ...]:
        return LinearOperator._names_of(self, pick)

    def _matmat(self, V: Tensor) -> Tensor:
        return self.Q.T @ self.inner._matmat(self.Q @ V)
