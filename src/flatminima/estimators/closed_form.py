"""What is known of an operator's diagonal without a single random probe.

The Gauss–Newton matrix of a network has an exact diagonal at the cost of a few backward passes; a Hessian is that matrix plus
a residual whose diagonal blocks vanish in piecewise-linear networks. Scalings, sums, congruences and blocks keep the knowledge.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch

from flatminima._errors import NotSupported
from flatminima.estimators.estimate import Estimate
from flatminima.estimators.gauss_newton_diagonal import gauss_newton_squares
from flatminima.operators import GaussNewton, Hessian, LinearOperator
from flatminima.operators.composites import Block, BlockDiagonal, Congruence, Scaled, Shifted, Sum
from flatminima.operators.low_rank import LowRank
from flatminima.operators.sandwich import Sandwich

__all__ = ["ControlVariate", "control_variate", "known_block_traces", "known_diagonal"]


@final
@dataclass(frozen=True)
class ControlVariate:
    """A split A = known + residual.

    Attributes:
        known: The part whose diagonal is known exactly.
        groups: Names of A's blocks, layer by layer; together all of them. In a piecewise-linear network the residual's
            diagonal block of each layer is zero.
    """

    known: LinearOperator
    groups: tuple[tuple[str, ...], ...]


def known_diagonal(A: LinearOperator) -> Estimate | None:
    """Return the exact diagonal ``(n,)``, or None where no closed form applies."""
    match A:
        case Sandwich():
            try:
                squares, num_gradients = gauss_newton_squares(A, diagonal=True)
            except NotSupported:
                return None
            value = torch.cat([squares[name].reshape(-1) for name in A.blocks])
            return Estimate.exact(value, method=f"exact {A.label} diagonal", num_gradients=num_gradients)
        case LowRank():
            return Estimate.exact(A.diagonal(), method="exact low-rank diagonal")
        case Block() if A.direct is not None:
            return known_diagonal(A.direct)
        case BlockDiagonal():
            return known_diagonal(A.inner)
        case Scaled():
            return _mapped(known_diagonal(A.inner), lambda d: A.factor * d)
        case Shifted():
            return _mapped(known_diagonal(A.inner), lambda d: A.shift_by + d)
        case Congruence():
            return _mapped(known_diagonal(A.inner), lambda d: A.d.square() * d)
        case Block():
            return _mapped(known_diagonal(A.inner), lambda d: d[A.indices])
        case Sum():
            first, second = known_diagonal(A.inner), known_diagonal(A.other)
            if first is None or second is None:
                return None
            return Estimate.exact(
                first.value + second.value, method=first.method, num_gradients=first.num_gradients + second.num_gradients
            )
        case _:
            return None


def known_block_traces(A: LinearOperator) -> dict[str, Estimate] | None:
    """Return the exact trace of every block by its name, or None where no closed form applies.

    The number of gradients stands with the first block, since one computation serves all.
    """
    if isinstance(A, Block) and A.direct is not None:
        return known_block_traces(A.direct)
    if isinstance(A, Sandwich):  # traces need no per-weight squares: cheaper than the diagonal
        try:
            traces, num_gradients = gauss_newton_squares(A, diagonal=False)
            method = f"exact {A.label} trace"
        except NotSupported:
            return None
    else:
        diagonal = known_diagonal(A)
        if diagonal is None:
            return None
        method = diagonal.method.replace("diagonal", "trace")
        traces = {name: diagonal.value[where].sum() for name, where in A.blocks.items()}
        num_gradients = diagonal.num_gradients
    estimates = {name: Estimate.exact(value, method=method) for name, value in traces.items()}
    first = next(iter(estimates))
    estimates[first] = replace(estimates[first], num_gradients=num_gradients)
    return estimates


def control_variate(A: LinearOperator) -> ControlVariate | None:
    """Return a split of A into a part with a known diagonal and a residual, or None where there is none."""
    known = _known_part(A)
    if known is None or known is A:
        return None
    groups: dict[str, list[str]] = {}
    for name in A.blocks:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    return ControlVariate(known, tuple(tuple(names) for names in groups.values()))


def _known_part(A: LinearOperator) -> LinearOperator | None:
    match A:
        case Sandwich() | LowRank():
            return A
        case Hessian():
            try:
                return GaussNewton(A.objective.at(A.theta))
            except NotSupported:
                return None
        case Scaled() | Shifted() | Congruence() | Block() | BlockDiagonal():
            inner = _known_part(A.inner)
            return A if inner is A.inner else None if inner is None else A.with_inner(inner)
        case Sum():
            first, second = _known_part(A.inner), _known_part(A.other)
            if first is None or second is None:
                return None
            return A if first is A.inner and second is A.other else Sum(first, second)
        case _:
            return None


def _mapped(estimate: Estimate | None, function: object) -> Estimate | None:
    assert callable(function)
    return None if estimate is None else replace(estimate, value=function(estimate.value))
