"""KrylovSpace: a growing orthonormal basis with the compression of A to it, that can be cut back and started anew.

With several start vectors, restarts and breakdowns the three-term recursion no longer holds, but one identity always does:

    A V = V T + Q C

with orthonormal [V, Q]. V is the basis, T = Vᵀ A V; the columns of Q are the *candidates*, directions in which A leaves the
space, and C says how strongly. A step moves one candidate q from Q into V and puts the new part of A q into Q in its place. A
thick restart rotates V to its Ritz vectors and drops some; Q stays (Wu & Simon 2000). A fresh random direction is a candidate
with a zero row in C. What A leads out of a Ritz vector V s is Q C s, whose length is the residual.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from flatminima.estimators.lanczos import BREAKDOWN, length, orthogonalise
from flatminima.estimators.sampling import check_finite
from flatminima.operators.base import LinearOperator

__all__ = ["KrylovSpace"]


@final
class KrylovSpace:
    """The identity A V = V T + Q C, kept up step by step. T and C live on the CPU in float64."""

    def __init__(self, A: LinearOperator, max_dimension: int, generator: torch.Generator | None) -> None:
        self.A = A
        self.generator = generator
        self.max_dimension = max_dimension
        self.dimension = 0
        self.num_products = 0
        self._rows = torch.empty(max_dimension, A.size, dtype=A.dtype, device=A.device)  # Vᵀ
        self._T = torch.zeros(max_dimension, max_dimension, dtype=torch.float64)
        self._scale = 0.0
        self._rounding = BREAKDOWN * torch.finfo(A.dtype).eps
        # by chain: a candidate's successors keep the number of the start vector
        self._candidates: dict[int, Tensor] = {}
        self._couplings: dict[int, Tensor] = {}
        self._num_chains = 0

    @property
    def chains(self) -> tuple[int, ...]:
        """Numbers of the chains that can be expanded, oldest first."""
        return tuple(self._candidates)

    @property
    def is_full(self) -> bool:
        """Whether the basis spans everything, so that T's eigenvalues are A's."""
        return self.dimension == self.A.size

    def start(self, v: Tensor | None = None) -> int | None:
        """Add v ``(n,)``, or a random direction, as a new chain.

        Returns:
            The chain's number; None where v lies in the basis already, or nothing is left outside of it.
        """
        if self.is_full:
            return None
        w = self._random_direction() if v is None else v
        for _ in range(2):  # once more at its new length: w may lie almost in the basis
            w = w / length(w)
            w = orthogonalise(w, self._rows[: self.dimension])[0]
            if length(w) <= 1e2 * self._rounding:
                return None if v is not None else self.start()
        self._num_chains += 1
        self._follow(self._num_chains, w / length(w), self._rounding)
        return self._num_chains

    def expand(self, chain: int) -> None:
        """Take the chain's candidate into the basis; one product. The chain ends if A leads nowhere new."""
        m = self.dimension
        self._rows[m] = self._candidates.pop(chain)
        del self._couplings[chain]
        self.dimension = m + 1
        w = check_finite(self.A @ self._rows[m])
        self.num_products += 1
        self._scale = max(self._scale, length(w))
        w, inside = orthogonalise(w, self._rows[: m + 1])
        column = inside.to("cpu", torch.float64)
        self._T[m, : m + 1] = column
        self._T[: m + 1, m] = column
        leaving = self._follow(chain, w, self._rounding * self._scale)
        if chain in self._couplings:
            self._couplings[chain][m] += leaving

    def _follow(self, chain: int, w: Tensor, tolerance: float) -> float:
        """Make w ``(n,)``, orthogonal to V, the direction of the chain's candidate, and return its length.

        The other candidates are turned within the span of all, which leaves Q C as it is. If w were only cleared of them
        instead, the chain would never see what they hide.
        """
        if self.is_full or length(w) <= tolerance:
            return 0.0
        labels = list(self._candidates)
        Q = torch.stack([self._candidates[label] for label in labels]) if labels else self._rows[:0]
        C = torch.stack([self._couplings[label] for label in labels]) if labels else self._T[:0]
        new, across = orthogonalise(w, Q)
        c = across.to("cpu", torch.float64)
        beyond = length(new)
        if beyond > tolerance and self.dimension + len(labels) < self.A.size:
            Q = torch.cat([Q, self._cleared(new / beyond, Q)[None]])
            C = torch.cat([C, C.new_zeros(1, C.shape[1])])
            c = torch.cat([c, c.new_tensor([beyond])])
        else:
            del labels[0]  # w adds no dimension: one of the others becomes this chain's
        turn = _reflection(c)
        Q, C = turn.to(Q) @ Q, turn @ C
        names = [*labels, chain]
        self._candidates = dict(zip(names, Q, strict=True))
        self._couplings = dict(zip(names, C, strict=True))
        return length(c)

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Return T's eigenvalues ``(m,)``, ascending, and its eigenvectors S ``(m, m)``, in float64."""
        m = self.dimension
        values, vectors = torch.linalg.eigh(self._T[:m, :m])
        return values, vectors

    def leaving(self, S: Tensor) -> dict[int, Tensor]:
        """Return by chain how far A leads the vectors V S out of the space in its candidate's direction, each ``(k,)``."""
        return {chain: (row[: self.dimension] @ S).abs() for chain, row in self._couplings.items()}

    def residuals(self, S: Tensor) -> Tensor:
        """Return the lengths ``(k,)`` of A V s − θ V s for Ritz vectors, without a product."""
        total = torch.zeros(S.shape[1], dtype=torch.float64)
        for part in self.leaving(S).values():
            total += part**2
        return total.sqrt()

    def vectors(self, S: Tensor) -> Tensor:
        """Return V S, shape ``(n, k)``."""
        return (S.T.to(self._rows) @ self._rows[: self.dimension]).T

    def restart(self, values: Tensor, S: Tensor) -> None:
        """Shrink the basis to the Ritz vectors V S with these Ritz values."""
        m, kept = self.dimension, S.shape[1]
        self._rows[:kept] = self.vectors(S).T
        self._T.zero_()
        self._T[:kept, :kept] = torch.diag(values)
        for row in self._couplings.values():
            shrunk = row[:m] @ S
            row.zero_()
            row[:kept] = shrunk
        self.dimension = kept

    def _cleared(self, q: Tensor, Q: Tensor) -> Tensor:
        """Return the unit vector q without what rounding left of V and Q in it, which is much if q is a small difference."""
        q = orthogonalise(q, torch.cat([self._rows[: self.dimension], Q]))[0] if len(Q) else q
        return q / length(q)

    def _random_direction(self) -> Tensor:
        device = self.A.device if self.generator is None else self.generator.device
        return torch.randn(self.A.size, dtype=self.A.dtype, device=device, generator=self.generator).to(self.A.device)


def _reflection(c: Tensor) -> Tensor:
    """Return an orthogonal matrix whose last row is c / ‖c‖, for c of shape ``(p,)``."""
    u = c / torch.linalg.vector_norm(c)
    sign = -1.0 if float(u[-1]) > 0 else 1.0  # away from cancellation
    h = u.clone()
    h[-1] -= sign
    H: Tensor = torch.eye(c.numel(), dtype=c.dtype) - 2 * torch.outer(h, h) / h.dot(h)
    H[-1] *= sign
    return H
