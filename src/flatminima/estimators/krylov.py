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

from flatminima.estimators.lanczos import BREAKDOWN, orthogonalise
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
            The chain's number; None where v lies in the space already, or nothing is left outside of it.
        """
        if self.dimension + len(self._candidates) >= self.A.size:
            return None
        w = self._random_direction() if v is None else v
        length = torch.linalg.vector_norm(w)
        for _ in range(2):  # once more after scaling: w may lie almost in the space
            w = self._outside(w / length)[0]
            length = torch.linalg.vector_norm(w)
            if float(length) <= 1e2 * BREAKDOWN * torch.finfo(self.A.dtype).eps:
                return None if v is not None else self.start()
        self._num_chains += 1
        self._candidates[self._num_chains] = w / length
        self._couplings[self._num_chains] = torch.zeros(self.max_dimension, dtype=torch.float64)
        return self._num_chains

    def expand(self, chain: int) -> None:
        """Take the chain's candidate into the basis; one product. The chain ends if A leads nowhere new."""
        q = self._candidates.pop(chain)
        coupling = self._couplings.pop(chain)
        m = self.dimension
        self._rows[m] = q
        self.dimension = m + 1
        w = check_finite(self.A @ q)
        self.num_products += 1
        self._scale = max(self._scale, float(torch.linalg.vector_norm(w)))
        w, inside, across = self._outside(w)
        self._T[m, : m + 1] = inside
        self._T[: m + 1, m] = inside
        for other, coefficient in across.items():
            self._couplings[other][m] = coefficient
        length = float(torch.linalg.vector_norm(w))
        if not self.is_full and length > BREAKDOWN * torch.finfo(self.A.dtype).eps * self._scale:
            self._candidates[chain] = w / length
            coupling.zero_()
            coupling[m] = length
            self._couplings[chain] = coupling

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

    def _outside(self, w: Tensor) -> tuple[Tensor, Tensor, dict[int, float]]:
        """Return the part of w outside [V, Q], its coefficients in V, and those in Q by chain."""
        m = self.dimension
        if not self._candidates:
            w, inside = orthogonalise(w, self._rows[:m])
            return w, inside.to("cpu", torch.float64), {}
        Q = torch.stack(list(self._candidates.values()))
        first, second = self._rows[:m] @ w, Q @ w
        w = w - first @ self._rows[:m] - second @ Q
        more, again = self._rows[:m] @ w, Q @ w
        w = w - more @ self._rows[:m] - again @ Q
        across = dict(zip(self._candidates, (second + again).tolist(), strict=True))
        return w, (first + more).to("cpu", torch.float64), across

    def _random_direction(self) -> Tensor:
        device = self.A.device if self.generator is None else self.generator.device
        return torch.randn(self.A.size, dtype=self.A.dtype, device=device, generator=self.generator).to(self.A.device)
