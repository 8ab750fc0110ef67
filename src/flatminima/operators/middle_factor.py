r"""MiddleFactor: the factor Λ between the Jacobians of a matrix Jᵀ Λ J, for one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

from torch import Tensor

from flatminima.objective import Evaluation

__all__ = ["Columns", "MiddleFactor", "MiddleFactors", "by_row", "of_columns"]

#: Gives pairs of a column ``(batch, …)`` and its signs ``(batch,)``, any number of times.
Columns = Callable[[], Iterator[tuple[Tensor, Tensor]]]


@final
@dataclass(frozen=True)
class MiddleFactor:
    """A symmetric map Λ from outputs to outputs, block-diagonal in the rows (examples).

    Attributes:
        product: u ↦ Λ u, in the outputs' shape.
        columns: Gives s and σ with Λ = Σ_c Σ_b σ_cb s_cb s_cbᵀ, s_cb being row b of column c and zero in all other rows.
        num_columns: How many columns there are.
        has_exact_columns: Whether the columns are Λ's by construction and cheap to form again. Otherwise they come from an
            eigendecomposition, which presumes that the loss does not couple rows.
    """

    product: Callable[[Tensor], Tensor]
    columns: Columns
    num_columns: int
    has_exact_columns: bool = True


#: Makes Λ of each batch from its evaluation and its outputs, detached; called in the order of the data, once a batch.
MiddleFactors = Callable[[Evaluation, Tensor], MiddleFactor]


def by_row(weights: Tensor, like: Tensor) -> Tensor:
    """Return weights ``(batch,)`` in a form that multiplies ``(batch, …)``."""
    return weights.reshape(-1, *[1] * (like.ndim - 1)).to(like.dtype)


def of_columns(columns: Callable[[], Iterator[Tensor]], num_columns: int) -> MiddleFactor:
    """Return Λ = Σ_c Σ_b s_cb s_cbᵀ of columns ``(batch, …)`` that are cheap to form."""

    def product(u: Tensor) -> Tensor:
        result = u.new_zeros(u.shape)
        for s in columns():
            inner = s * u
            result += s * by_row(inner.flatten(1).sum(1) if inner.ndim > 1 else inner, s)
        return result

    def signed() -> Iterator[tuple[Tensor, Tensor]]:
        for s in columns():
            yield s, s.new_ones(len(s))

    return MiddleFactor(product, signed, num_columns)
