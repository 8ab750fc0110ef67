"""LinearOperator: a symmetric matrix known by its products."""

from __future__ import annotations

import math
import numbers
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from flatminima._errors import NotSupported
from flatminima.operators.free_memory import check_dense_fits
from flatminima.params import ParameterSpace, Selection

if TYPE_CHECKING:
    import scipy.sparse.linalg

__all__ = ["DEFAULT_GRAPH_BYTES", "LinearOperator", "is_missing_derivative", "named_missing_derivative"]

#: Most memory that graphs which are kept between products may take, unless told otherwise.
DEFAULT_GRAPH_BYTES = 2**30


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

    def keeping_graphs(self, max_bytes: int = DEFAULT_GRAPH_BYTES) -> AbstractContextManager[None]:
        """Return a block in which many products are made: what they have in common is kept in memory until its end.

        A product then takes 2 gradients instead of 3. The data are read at the first product in the block, and the numbers are
        the same. Estimators open such a block themselves.

        Args:
            max_bytes: Most memory to keep; where it does not suffice, nothing is kept.
        """
        del max_bytes
        return nullcontext()

    def _restricted(self, names: Sequence[str]) -> LinearOperator | None:
        """Return the diagonal block of these blocks as an operator that costs less than all rows, or None where there is none."""
        del names
        return None

    def _names_of(self, pick: object) -> tuple[str, ...]:
        """Return the names of the blocks that a module or parameter holds."""
        raise TypeError(
            f"`selection` must be names or patterns (this operator knows no model). Got {type(pick).__name__}. "
            f"Blocks: {', '.join(list(self.blocks)[:8])}."
        )

    # --- algebra ----------------------------------------------------------------------------------------------------------

    @final
    def __add__(self, other: LinearOperator) -> LinearOperator:
        from flatminima.operators.composites import Sum

        return Sum(self, other) if isinstance(other, LinearOperator) else NotImplemented

    @final
    def __sub__(self, other: LinearOperator) -> LinearOperator:
        return self + (-other) if isinstance(other, LinearOperator) else NotImplemented

    @final
    def __mul__(self, factor: Any) -> LinearOperator:
        """Return c A for a real number c: a Python or NumPy number, or a tensor ``()``.

        Raises:
            TypeError: If c is complex.
            ValueError: If c is not finite, or a tensor or array of more than one number.
        """
        from flatminima.operators.composites import Scaled

        return NotImplemented if isinstance(factor, LinearOperator | str) else Scaled(self, _number("factor", factor))

    __rmul__ = __mul__
    # NumPy's numbers leave the product with an operator to the operator.
    __array_ufunc__ = None

    @final
    def __neg__(self) -> LinearOperator:
        return self * -1.0

    @final
    def shift(self, c: Any) -> LinearOperator:
        """Return A + c I for a real number c: every eigenvalue moves by c, and no eigenvector does.

        Raises:
            TypeError: If c is complex.
            ValueError: If c is not finite, or a tensor of more than one number.
        """
        from flatminima.operators.composites import Shifted

        return Shifted(self, _number("c", c))

    @final
    def congruence(self, d: Tensor) -> LinearOperator:
        """Return D A D with D = diag(d), d of shape ``(n,)``: the matrix in the coordinates θ = D η."""
        from flatminima.operators.composites import Congruence

        return Congruence(self, d)

    @final
    def projection(self, Q: Tensor) -> LinearOperator:
        """Return the compression Qᵀ A Q, shape ``(k, k)``, to the span of Q's orthonormal columns.

        Its eigenvalues lie between those of A (Cauchy's interlacing); with eigenvectors of A they are A's own.

        Args:
            Q: Shape ``(n, k)``.

        Raises:
            ValueError: If the columns are not orthonormal, or do not fit.
        """
        from flatminima.operators.composites import Projection

        return Projection(self, Q)

    # --- blocks -----------------------------------------------------------------------------------------------------------

    @final
    def block(self, selection: Selection) -> LinearOperator:
        """Return the diagonal block of the rows that a selection picks, in their order.

        Args:
            selection: One or several of: a block's name, a shell-style pattern, a module's name; where the operator belongs to
                an objective also a module or a parameter of its model.

        Raises:
            ValueError: If nothing matches.
            TypeError: If the selection holds anything else.
        """
        from flatminima.operators.composites import Block

        return Block(self, self._select(selection))

    @final
    def block_diagonal(self, selections: Iterable[Selection] | None = None) -> LinearOperator:
        """Return the matrix that has A's diagonal blocks in their places and zeros elsewhere, shape ``(n, n)``.

        A product is made block by block: one product of A with a vector of all blocks would add the blocks' cross terms. (In
        the mean over probes with independent signs these vanish, so ``block_traces`` needs one product for all blocks.)

        Args:
            selections: What belongs together, as for ``block``; together all the rows, each once. None is every named block
                by itself.

        Raises:
            ValueError: If a selection matches nothing, or a row is in none or in two of them.
        """
        from flatminima.operators.composites import BlockDiagonal

        groups = [(name,) for name in self.blocks] if selections is None else [self._select(pick) for pick in selections]
        names = [name for group in groups for name in group]
        if sorted(names) != sorted(self.blocks):
            counts = {name: names.count(name) for name in self.blocks}
            name, count = next((name, count) for name, count in counts.items() if count != 1)
            raise ValueError(f"`selections` must hold every block once. Got {name!r} {count} times.")
        return BlockDiagonal(self, groups)

    @final
    def _select(self, selection: Selection) -> tuple[str, ...]:
        """Return the names of the blocks that a selection picks, in the order of the rows."""
        is_one = isinstance(selection, str | torch.nn.Module | Tensor)
        if not is_one and not isinstance(selection, Sequence):
            raise TypeError(f"`selection` must be names, patterns, modules or parameters. Got {type(selection).__name__}.")
        space = ParameterSpace({n: torch.Size([s.stop - s.start]) for n, s in self.blocks.items()})
        chosen: set[str] = set()
        for pick in [selection] if is_one else selection:  # type: ignore[union-attr]
            chosen.update(space.select(pick) if isinstance(pick, str) else self._names_of(pick))
        names = tuple(name for name in self.blocks if name in chosen)
        if not names:
            got, known = ", ".join(sorted(chosen)[:8]) or "nothing", ", ".join(list(self.blocks)[:8])
            raise ValueError(f"`selection` must pick blocks of this operator. Got {got}. Blocks: {known}.")
        return names

    # --- other forms ------------------------------------------------------------------------------------------------------

    @final
    def to_dense(self, *, columns_at_once: int = 64) -> Tensor:
        """Return the matrix ``(n, n)``; costs n products and 8 n² bytes in float64.

        Raises:
            NotSupported: At once, if the matrix is larger than the memory that is free.
        """
        check_dense_fits(self.size, self.dtype, self.device)
        result = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for start in range(0, self.size, columns_at_once):
            width = min(columns_at_once, self.size - start)
            E = torch.zeros(self.size, width, dtype=self.dtype, device=self.device)
            E[start : start + width] = torch.eye(width, dtype=self.dtype, device=self.device)
            result[:, start : start + width] = self @ E
        return result

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


def is_missing_derivative(error: RuntimeError) -> bool:
    """Tell whether an error of torch's says that an operation cannot be differentiated so often, or in this mode."""
    signs = ("not implemented", "not been implemented", "once_differentiable", "setup_context")
    return isinstance(error, NotImplementedError) or any(sign in str(error) for sign in signs)


@contextmanager
def named_missing_derivative() -> Iterator[None]:
    """Turn torch's error about a derivative that it does not have into NotSupported."""
    try:
        yield
    except RuntimeError as error:
        if not is_missing_derivative(error):
            raise
        raise NotSupported(f"torch has no second derivative for an operation of this model or loss: {error}") from error


def _number(name: str, value: Any) -> float:
    """Return a finite real number that may be a Python or NumPy number or a tensor of one number."""
    if isinstance(value, Tensor) or type(value).__module__ == "numpy":
        if math.prod(value.shape) != 1 or len(value.shape):
            raise ValueError(f"`{name}` must be one number. Got shape {tuple(value.shape)}. Use congruence(d) for one per row.")
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"`{name}` must be a real number (operators are real and symmetric). Got {value!r}.")
    if not math.isfinite(value):
        raise ValueError(f"`{name}` must be finite. Got {value!r}.")
    return float(value)
