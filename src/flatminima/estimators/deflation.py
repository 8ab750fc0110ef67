"""Deflation: eigenvalues that stand out are found and taken out of the probes, which removes the variance that they cause."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from flatminima.estimators.eigenpairs import Eigenpairs, eigenpairs
from flatminima.estimators.gauss_quadrature import GaussRule
from flatminima.estimators.orthogonality import working_dtype
from flatminima.estimators.sampling import Plan
from flatminima.estimators.stopping import samples_to_stop
from flatminima.operators.base import LinearOperator

__all__ = ["Known", "choose_count", "find_known", "known_from"]

_MOST_PAIRS = 64
_KNOWN_BYTES = 2**28
_RTOL = 1e-3
#: Products to find k pairs: about so many and so many for each.
_COST, _COST_EACH = 16, 4
#: Further pairs to find, as a share of those that seem to stand out: a probe holds any one of them with a random weight.
_MARGIN = 0.25


@final
@dataclass(frozen=True, eq=False)
class Known:
    """Eigenvalues that are not sampled.

    Attributes:
        values: Shape ``(k,)``, float64 on the CPU.
        rows: Their orthonormal vectors, shape ``(k, n)``.
        residual: ‖A X − X Λ‖_F. The spectrum that is described is that of a matrix this close to A; its trace is A's.
    """

    values: Tensor
    rows: Tensor
    residual: float = 0.0

    @classmethod
    def nothing(cls, A: LinearOperator) -> Known:
        """Return no eigenvalues."""
        return cls(torch.zeros(0, dtype=torch.float64), torch.zeros(0, A.size, dtype=working_dtype(A.dtype), device=A.device))

    @property
    def count(self) -> int:
        """Number k of eigenvalues."""
        return self.values.numel()


def known_from(A: LinearOperator, pairs: Eigenpairs) -> Known:
    """Return the pairs that a caller has found earlier, checked.

    Raises:
        ValueError: If the vectors do not fit A or are not orthonormal, or a residual is above a tenth of the largest |λ|.
    """
    X = pairs.vectors.detach()
    dtype = working_dtype(A.dtype)
    if X.shape[0] != A.size or X.dtype != dtype or X.device != A.device:
        raise ValueError(
            f"`deflate` must be eigenpairs of A (vectors of {A.size} rows, {dtype} on {A.device}). "
            f"Got vectors of shape {tuple(X.shape)}, {X.dtype} on {X.device}."
        )
    gram = (X.T @ X).double().cpu()
    if (gram - torch.eye(X.shape[1], dtype=torch.float64)).abs().max() > 1e3 * torch.finfo(dtype).eps:
        raise ValueError("`deflate` must have orthonormal vectors. Got some that are not. Pass what eigenpairs() returned.")
    if float(pairs.residuals.max()) > 0.1 * float(pairs.values.abs().max()):
        raise ValueError(
            "`deflate` must be eigenpairs with residuals of at most a tenth of the largest |λ|. "
            f"Got {float(pairs.residuals.max()):.3g}. Give eigenpairs() a smaller rtol."
        )
    residual = float(torch.linalg.vector_norm(pairs.residuals.double()))
    return Known(pairs.values.detach().double().cpu(), X.T.contiguous(), residual)


def find_known(A: LinearOperator, k: int, plan: Plan, max_products: int) -> tuple[Known, int]:
    """Return the k eigenvalues of largest magnitude, as far as they were found, and the products made.

    Residuals of a thousandth of the largest |λ| suffice: what they leave out is of the order of their squares.
    """
    seconds = None if plan.deadline == math.inf else max(plan.deadline - time.monotonic(), 1e-3)
    limit = max(2 * k, max_products)
    pairs = eigenpairs(A, k, which="LM", rtol=_RTOL, max_products=limit, max_seconds=seconds, generator=plan.generator)
    good = pairs.residuals <= 2 * _RTOL * pairs.values.abs().max()
    kept = Eigenpairs(pairs.values[good], pairs.vectors[:, good], pairs.residuals[good], True, pairs.num_products, _RTOL)
    return (known_from(A, kept) if bool(good.any()) else Known.nothing(A)), pairs.num_products


def choose_count(
    A: LinearOperator,
    rules: Sequence[GaussRule],
    columns: Callable[[Tensor], Tensor],
    scale: Callable[[Tensor, Tensor], Tensor],
    rtol: float,
    num_steps: float,
    fewest_probes: int,
) -> tuple[int, float]:
    """Return how many eigenvalues to take out, as the rules of a few probes forecast it, and the products forecast.

    A probe in a space of dimension d has the sample variance 2 (Σ g² − (Σ g)²/d) / n² for the mean of g over the spectrum.

    Args:
        A: Operator.
        rules: Of the probes.
        columns: From nodes ``(m,)`` to the numbers that are averaged, ``(m, c)``.
        scale: From columns and weights to what their errors are relative to, ``(c,)``.
        rtol: Relative error to reach.
        num_steps: Products a probe.
        fewest_probes: Probes before the first look at the error.
    """
    nodes = torch.cat([rule.nodes for rule in rules])
    order = nodes.abs().argsort(descending=True)
    nodes = nodes[order]
    weights = torch.cat([rule.weights for rule in rules])[order] / len(rules)
    G, n = columns(nodes), A.size
    unit = scale(G, weights)
    rest = weights.flip(0).cumsum(0).flip(0)  # mass from each node on
    first = (weights[:, None] * G).flip(0).cumsum(0).flip(0)
    second = (weights[:, None] * G**2).flip(0).cumsum(0).flip(0)
    most = min(_MOST_PAIRS, A.size // 4, _KNOWN_BYTES // (A.size * A.dtype.itemsize))
    best, cheapest = 0, math.inf
    for i in range(nodes.numel()):
        k = math.ceil(n * (1 - float(rest[i])) - 1e-9)
        if k > most:
            break
        variance = (2 / n * (second[i] - first[i] ** 2 / rest[i])).clamp_min(0)
        relative = float((variance.sqrt() / unit).nan_to_num(0.0, posinf=1e30).max())
        cost = samples_to_stop((relative / rtol) ** 2, fewest_probes) * num_steps + (_COST + _COST_EACH * k if k else 0)
        if cost < cheapest * (0.8 if best == 0 else 1.0):
            best, cheapest = k, cost
    return min(most, best + math.ceil(_MARGIN * best)), cheapest
