"""LinearOperator: a symmetric matrix known by its products, and the matrices made of others."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from flatminima._checks import check_shape
from flatminima._errors import NotSupported
from flatminima.params import ParameterSpace

if TYPE_CHECKING:
    import scipy.sparse.linalg

__all__ = ["Block", "Congruence", "Dense", "LinearOperator", "Scaled", "Sum", "as_operator"]


class LinearOperator(ABC):
    """A symmetric real matrix A of shape ``(n, n)`` that is known by its products with vectors.

    Operators are values: they add, scale and restrict without being formed, and no product leaves a graph behind.
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """Number n of rows."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Data type of vectors and results."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of vectors and results."""

    @property
    @abstractmethod
    def blocks(self) -> Mapping[str, slice]:
        """Named index ranges that cover the rows in order, for example one per parameter."""

    @abstractmethod
    def _matmat(self, V: Tensor) -> Tensor:
        """Return A V for checked V ``(n, k)``."""

    @property
    @final
    def shape(self) -> tuple[int, int]:
        """``(n, n)``."""
        return (self.size, self.size)

    @final
    def __matmul__(self, v: Tensor) -> Tensor:
        """Return A v for v of shape ``(n,)`` or ``(n, k)``, in the operator's dtype, detached.

        Raises:
            ValueError: If the shape, dtype or device of ``v`` does not fit.
        """
        if not isinstance(v, Tensor):
            raise TypeError(f"`v` must be a tensor of shape ({self.size},) or ({self.size}, k). Got {type(v).__name__}.")
        if v.ndim not in (1, 2) or v.shape[0] != self.size:
            raise ValueError(f"`v` must have shape ({self.size},) or ({self.size}, k). Got {tuple(v.shape)}.")
        if v.dtype != self.dtype or v.device != self.device:
            raise ValueError(
                f"`v` must be {self.dtype} on {self.device}. Got {v.dtype} on {v.device}. Call v.to(A.device, A.dtype)."
            )
        V = v.detach().unsqueeze(1) if v.ndim == 1 else v.detach()
        result = self._matmat(V) if V.shape[1] else V.clone()
        if not bool(torch.isfinite(result).all()) and bool(torch.isfinite(V).all()):
            warnings.warn(
                f"A product of {type(self).__name__} is infinite or NaN: it overflowed. Use dtype=torch.float32 or wider.",
                RuntimeWarning,
                stacklevel=2,
            )
        return result.squeeze(1) if v.ndim == 1 else result

    @final
    def __add__(self, other: LinearOperator) -> LinearOperator:
        return Sum(self, other) if isinstance(other, LinearOperator) else NotImplemented

    @final
    def __sub__(self, other: LinearOperator) -> LinearOperator:
        return Sum(self, Scaled(other, -1.0)) if isinstance(other, LinearOperator) else NotImplemented

    @final
    def __mul__(self, factor: float) -> LinearOperator:
        return Scaled(self, float(factor)) if isinstance(factor, int | float) else NotImplemented

    __rmul__ = __mul__

    @final
    def __neg__(self) -> LinearOperator:
        return Scaled(self, -1.0)

    @final
    def congruence(self, d: Tensor) -> LinearOperator:
        """Return D A D with D = diag(d), d of shape ``(n,)``: the matrix in the coordinates θ = D η."""
        return Congruence(self, d)

    @final
    def block(self, name: str) -> LinearOperator:
        """Return the diagonal block of the rows that ``name`` picks: a block's name, a shell-style pattern, or a module's name.

        Raises:
            ValueError: If nothing matches.
        """
        space = ParameterSpace({n: torch.Size([s.stop - s.start]) for n, s in self.blocks.items()})
        return Block(self, space.select(name))

    @final
    def to_dense(self, *, columns_at_once: int = 64) -> Tensor:
        """Return the matrix ``(n, n)``; costs n products and 8 n² bytes in float64."""
        columns = []
        for start in range(0, self.size, columns_at_once):
            width = min(columns_at_once, self.size - start)
            E = torch.zeros(self.size, width, dtype=self.dtype, device=self.device)
            E[start : start + width] = torch.eye(width, dtype=self.dtype, device=self.device)
            columns.append(self @ E)
        return torch.cat(columns, dim=1)

    @final
    def to_scipy(self) -> scipy.sparse.linalg.LinearOperator:
        """Return a SciPy ``LinearOperator`` that takes and gives NumPy arrays on the CPU."""
        import numpy as np
        from scipy.sparse.linalg import LinearOperator as SciPyOperator

        numpy_dtype = np.dtype(str(self.dtype).removeprefix("torch."))

        def product(x: Any) -> Any:
            v = torch.from_numpy(np.ascontiguousarray(x, dtype=numpy_dtype)).to(self.device)
            return (self @ (v.reshape(self.size, -1))).reshape(x.shape).cpu().numpy()

        return SciPyOperator(self.shape, matvec=product, rmatvec=product, matmat=product, rmatmat=product, dtype=numpy_dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(size={self.size}, dtype={str(self.dtype).removeprefix('torch.')})"


@contextmanager
def named_missing_derivative() -> Iterator[None]:
    """Turn torch's error about a derivative that it does not have into NotSupported."""
    try:
        yield
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        raise NotSupported(f"torch has no second derivative for an operation of this model or loss: {error}") from error


def as_operator(matrix: Tensor, *, blocks: Mapping[str, slice] | None = None) -> LinearOperator:
    """Return a plain symmetric matrix as an operator, so that estimators can be tried on a known spectrum.

    Args:
        matrix: Symmetric, real, shape ``(n, n)``.
        blocks: Named ranges of rows; one block ``"all"`` by default.

    Raises:
        ValueError: If the matrix is not square, not real floating point, or not symmetric, or the blocks do not cover its rows.

    Example:
        >>> A = as_operator(torch.diag(torch.tensor([1.0, 2.0])))
        >>> A @ torch.ones(2)
        tensor([1., 2.])
    """
    return Dense(matrix, blocks)


@final
class Dense(LinearOperator):
    """A matrix that is held in memory."""

    def __init__(self, matrix: Tensor, blocks: Mapping[str, slice] | None = None) -> None:
        if not isinstance(matrix, Tensor) or matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            got = tuple(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
            raise ValueError(f"`matrix` must be a tensor of shape (n, n). Got {got}.")
        if not matrix.dtype.is_floating_point:
            raise ValueError(f"`matrix` must be real floating point. Got {matrix.dtype}. Call .double().")
        scale = matrix.abs().max() if matrix.numel() else matrix.new_zeros(())
        if matrix.numel() and (matrix - matrix.T).abs().max() > 1e2 * torch.finfo(matrix.dtype).eps * scale:
            raise ValueError("`matrix` must be symmetric. Got one that is not. Pass (A + A.T) / 2 if that is what you mean.")
        self._matrix = matrix.detach()
        self._blocks = _checked_blocks(blocks or {"all": slice(0, matrix.shape[0])}, matrix.shape[0])

    @property
    def size(self) -> int:
        return self._matrix.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._matrix.dtype

    @property
    def device(self) -> torch.device:
        return self._matrix.device

    @property
    def blocks(self) -> Mapping[str, slice]:
        return self._blocks

    def _matmat(self, V: Tensor) -> Tensor:
        return self._matrix @ V


def _checked_blocks(blocks: Mapping[str, slice], size: int) -> Mapping[str, slice]:
    """Return the blocks, if they cover the rows one after the other: only then do block traces add up to the trace."""
    end = 0
    for name, rows in blocks.items():
        if not isinstance(rows, slice) or rows.start != end or rows.step not in (None, 1) or not end <= rows.stop <= size:
            raise ValueError(
                f"`blocks` must be slices that cover the {size} rows in order. Got {name!r}: {rows} after row {end}."
            )
        end = rows.stop
    if end != size:
        raise ValueError(f"`blocks` must cover all {size} rows. Got blocks that end at row {end}.")
    return MappingProxyType(dict(blocks))


class _Wrapper(LinearOperator, ABC):
    """An operator made of another one of the same size."""

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


@final
class Sum(_Wrapper):
    """A + B."""

    def __init__(self, inner: LinearOperator, other: LinearOperator) -> None:
        if inner.shape != other.shape or inner.dtype != other.dtype or inner.device != other.device:
            raise ValueError(
                "Summands must agree in shape, dtype and device. "
                f"Got {inner.shape} {inner.dtype} {inner.device} and {other.shape} {other.dtype} {other.device}."
            )
        super().__init__(inner)
        self.other = other

    def _matmat(self, V: Tensor) -> Tensor:
        return self.inner @ V + self.other @ V


@final
class Scaled(_Wrapper):
    """c A for a number c."""

    def __init__(self, inner: LinearOperator, factor: float) -> None:
        super().__init__(inner)
        self.factor = factor

    def _matmat(self, V: Tensor) -> Tensor:
        return self.factor * (self.inner @ V)


@final
class Congruence(_Wrapper):
    """D A D with D = diag(d)."""

    def __init__(self, inner: LinearOperator, d: Tensor) -> None:
        super().__init__(inner)
        self.d = check_shape("d", d, (inner.size,), "one factor per row").detach().to(inner.device, inner.dtype)

    def _matmat(self, V: Tensor) -> Tensor:
        return self.d[:, None] * (self.inner @ (self.d[:, None] * V))


@final
class Block(_Wrapper):
    """The rows and columns of some of an operator's blocks."""

    def __init__(self, inner: LinearOperator, names: tuple[str, ...]) -> None:
        super().__init__(inner)
        self.names = names
        ranges = [inner.blocks[name] for name in names]
        self.indices = torch.cat([torch.arange(r.start, r.stop, device=inner.device) for r in ranges])
        blocks, start = {}, 0
        for name, r in zip(names, ranges, strict=True):
            blocks[name] = slice(start, start + r.stop - r.start)
            start = blocks[name].stop
        self._own_blocks = MappingProxyType(blocks)

    @property
    def size(self) -> int:
        return self.indices.numel()

    @property
    def blocks(self) -> Mapping[str, slice]:
        return self._own_blocks

    def _matmat(self, V: Tensor) -> Tensor:
        padded = torch.zeros(self.inner.size, V.shape[1], dtype=self.dtype, device=self.device)
        padded[self.indices] = V
        return (self.inner @ padded)[self.indices]
