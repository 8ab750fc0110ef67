"""KrylovSpace: a growing orthonormal basis with the compression of A to it, that can be cut back and started anew.

With several start vectors, restarts and breakdowns the three-term recursion no longer holds, but one identity always does:

    A V = V T + Q C

with orthonormal [V, Q]. V is the basis, T = Vᵀ A V; the columns of Q are the *candidates*, directions in which A leaves the
space, and C says how strongly. A step moves one candidate q from Q into V, or several at once, and puts the new part of A q
into Q in its place. A thick restart rotates V to its Ritz vectors and drops some; Q stays (Wu & Simon 2000). A fresh random
direction is a candidate with a zero row in C. What A leads out of a Ritz vector V s is Q C s, whose length is the residual.

By symmetry Vᵀ A q is known before the product: it is q's row of C. This part is taken away first. What the pass over all of V
then finds is rounding, and one pass suffices where plain Gram–Schmidt takes two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from flatminima.estimators.orthogonality import (
    breakdown_tolerance,
    checked_lengths,
    length,
    lengths,
    minus,
    orthogonalise,
    remainder,
    working_dtype,
)
from flatminima.operators.base import LinearOperator

__all__ = ["KrylovSpace"]


@final
class KrylovSpace:
    """The identity A V = V T + Q C, kept up step by step. V and Q are at least float32; T and C are float64 on the CPU."""

    def __init__(self, A: LinearOperator, max_dimension: int, generator: torch.Generator | None) -> None:
        self.A = A
        self.generator = generator
        self.max_dimension = max_dimension
        self.dimension = 0
        self.num_products = 0
        self.dtype = working_dtype(A.dtype)
        self._rows = self._new_rows()  # Vᵀ
        self._T = torch.zeros(max_dimension, max_dimension, dtype=torch.float64)
        self._scale = 0.0
        self._rounding = breakdown_tolerance(A.dtype)
        # by chain: a candidate's successors keep the number of the start vector
        self._labels: list[int] = []
        self._Q = self._rows[:0]
        self._C = self._T[:0]
        self._num_chains = 0

    @property
    def chains(self) -> tuple[int, ...]:
        """Numbers of the chains that can be expanded, oldest first."""
        return tuple(self._labels)

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
        w = self._random_direction() if v is None else v.to(self.dtype)
        for _ in range(2):  # once more at its new length: w may lie almost in the basis
            w = w / length(w)
            w = orthogonalise(w, self._rows[: self.dimension])[0]
            if length(w) <= 1e2 * breakdown_tolerance(self.dtype):
                return None if v is not None else self.start()
        self._num_chains += 1
        self._follow(self._num_chains, w / length(w), self._rounding)
        return self._num_chains

    def expand(self, chains: Sequence[int]) -> Tensor:
        """Take the chains' candidates into the basis; one product each, made at once. A chain ends if A leads nowhere new.

        Returns:
            The products, as rows ``(p, n)``.
        """
        m, p = self.dimension, len(chains)
        picks = [self._labels.index(chain) for chain in chains]
        others = [i for i in range(len(self._labels)) if i not in picks]
        known = self._C[picks, :m]
        self._rows[m : m + p] = self._Q[picks]
        self._labels, self._Q, self._C = [self._labels[i] for i in others], self._Q[others], self._C[others]
        self.dimension = m + p
        W = self._products(self._rows[m : m + p])
        self._scale = max(self._scale, *checked_lengths(W))
        outside, inside = self._outside(W, known)
        inside[:, m:] = (inside[:, m:] + inside[:, m:].T) / 2
        self._T[m : m + p, : m + p] = inside
        self._T[: m + p, m : m + p] = inside.T
        for i, chain in enumerate(chains):
            leaving = self._follow(chain, outside[i], self._rounding * self._scale)
            if chain in self._labels:
                self._C[self._labels.index(chain), m + i] += leaving
        return W

    def _products(self, rows: Tensor) -> Tensor:
        """Return A times the rows ``(p, n)``, as rows."""
        vectors = rows.to(self.A.dtype)
        W = (self.A @ vectors[0])[None] if len(rows) == 1 else (self.A @ vectors.T).T
        self.num_products += len(rows)
        return W.to(self.dtype).contiguous()

    def _outside(self, W: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Return what of W = A q, rows ``(p, n)``, lies outside the basis, whose last p rows are q, and W Vᵀ ``(p, m + p)``."""
        m, p = known.shape[1], known.shape[0]
        support = known.abs().amax(0).nonzero()
        first = int(support[0]) if support.numel() else m  # of the recursion's p last vectors, or all right after a restart
        near = self._rows[first : m + p]
        own = torch.stack([(W * q).sum(1) for q in self._rows[m : m + p]], dim=1)
        expected = torch.cat([known[:, first:].to(own), own], dim=1)
        W = minus(W, expected, near)
        W, rest = remainder(W, self._rows[: m + p], lengths(W))
        inside = rest.to("cpu", torch.float64)
        inside[:, :m] += known
        inside[:, m:] += own.to("cpu", torch.float64)
        return W, inside

    def _follow(self, chain: int, w: Tensor, tolerance: float) -> float:
        """Make w ``(n,)``, orthogonal to V, the direction of the chain's candidate, and return its length.

        The other candidates are turned within the span of all, which leaves Q C as it is. If w were only cleared of them
        instead, the chain would never see what they hide.
        """
        size = length(w)
        if self.is_full or size <= tolerance:
            return 0.0
        new_row = self._C.new_zeros(1, self.max_dimension)
        if not self._labels:
            self._labels, self._Q, self._C = [chain], (w / size)[None], new_row
            return size
        new, across = orthogonalise(w, self._Q)
        c = across.to("cpu", torch.float64)
        beyond = length(new)
        labels, Q, C = self._labels, self._Q, self._C
        if beyond > tolerance and self.dimension + len(labels) < self.A.size:
            Q, C = torch.cat([Q, self._cleared(new / beyond)[None]]), torch.cat([C, new_row])
            c = torch.cat([c, c.new_tensor([beyond])])
        else:
            labels = labels[1:]  # w adds no dimension: one of the others becomes this chain's
        self._labels = [*labels, chain]
        self._Q, self._C = _turned(c, Q, C)
        return float(torch.linalg.vector_norm(c))

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Return T's eigenvalues ``(m,)``, ascending, and its eigenvectors S ``(m, m)``, in float64."""
        m = self.dimension
        values, vectors = torch.linalg.eigh(self._T[:m, :m])
        return values, vectors

    def leaving(self, S: Tensor) -> Tensor:
        """Return how far A leads the vectors V S out of the space, C S ``(p, k)``: a row for each of :attr:`chains`."""
        leaving: Tensor = self._C[:, : self.dimension] @ S
        return leaving

    def residuals(self, S: Tensor) -> Tensor:
        """Return the lengths ``(k,)`` of A V s − θ V s for Ritz vectors, without a product."""
        sizes: Tensor = torch.linalg.vector_norm(self.leaving(S), dim=0)
        return sizes

    def rayleigh(self, S: Tensor) -> Tensor:
        """Return the Rayleigh quotients ``(k,)`` of the vectors V S, for S with orthonormal columns."""
        m = S.shape[0]
        quotients: Tensor = (S * (self._T[:m, :m] @ S)).sum(0)
        return quotients

    def largest_ritz(self) -> float:
        """Return the largest magnitude of T's eigenvalues."""
        return float(self.ritz()[0].abs().max())

    def image(self, S: Tensor) -> Tensor:
        """Return A V S ``(n, k)`` without a product: V T S + Q C S."""
        m = self.dimension
        outside = self.leaving(S).to(self._Q)
        return self.vectors(self._T[:m, :m] @ S) + (outside.T @ self._Q).T

    def random_signs(self, count: int) -> Tensor:
        """Return ``count`` random signs, float64 on the CPU."""
        device = self.A.device if self.generator is None else self.generator.device
        return torch.randint(2, (count,), generator=self.generator, device=device).to("cpu", torch.float64) * 2 - 1

    def recursion(self, chain: int) -> tuple[float, float]:
        """Return of a chain's newest step α = vᵀ A v and β, the length of what A v has outside the basis (0 at its end)."""
        last = self.dimension - 1
        beta = float(self._C[self._labels.index(chain), last]) if chain in self._labels else 0.0
        return float(self._T[last, last]), beta

    def vectors(self, S: Tensor) -> Tensor:
        """Return V S, shape ``(n, k)``, for coefficients in the first basis vectors ``(m, k)``."""
        return (S.T.to(self._rows) @ self._rows[: S.shape[0]]).T

    def distance(self, v: Tensor) -> float:
        """Return the distance of v ``(n,)`` from the space."""
        return length(orthogonalise(v, self._rows[: self.dimension])[0])

    def restart(self, values: Tensor, S: Tensor) -> None:
        """Shrink the basis to the Ritz vectors V S with these Ritz values."""
        m, kept = self.dimension, S.shape[1]
        rows = self._new_rows()  # the old ones may be part of a kept state
        torch.mm(S.T.to(rows), self._rows[:m], out=rows[:kept])
        self._rows = rows
        self._T = torch.zeros_like(self._T)
        self._T[:kept, :kept] = torch.diag(values)
        C = torch.zeros_like(self._C)
        C[:, :kept] = self._C[:, :m] @ S
        self._C = C
        self.dimension = kept

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what :meth:`restore` needs."""
        m = self.dimension
        tensors = {"rows": self._rows[:m], "T": self._T[:m, :m].clone(), "Q": self._Q, "C": self._C[:, :m].clone()}
        numbers = {
            "labels": list(self._labels),
            "num_chains": self._num_chains,
            "num_products": self.num_products,
            "scale": self._scale,
        }
        return tensors, numbers

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Go on from an earlier state."""
        m = self.dimension = tensors["rows"].shape[0]
        self._rows[:m] = tensors["rows"]
        self._T[:m, :m] = tensors["T"].cpu()
        self._Q = tensors["Q"]
        self._C = self._T.new_zeros(len(self._Q), self.max_dimension)
        self._C[:, :m] = tensors["C"].cpu()
        self._labels, self._num_chains = list(numbers["labels"]), numbers["num_chains"]
        self.num_products, self._scale = numbers["num_products"], numbers["scale"]

    def _new_rows(self) -> Tensor:
        return torch.empty(self.max_dimension, self.A.size, dtype=self.dtype, device=self.A.device)

    def _cleared(self, q: Tensor) -> Tensor:
        """Return the unit vector q without what rounding left of V and Q in it, which is much if q is a small difference."""
        q = orthogonalise(q, self._rows[: self.dimension])[0]
        q = orthogonalise(q, self._Q)[0]
        return q / length(q)

    def _random_direction(self) -> Tensor:
        device = self.A.device if self.generator is None else self.generator.device
        return torch.randn(self.A.size, dtype=self.dtype, device=device, generator=self.generator).to(self.A.device)


def _turned(c: Tensor, Q: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """Return H Q and H C for an orthogonal H whose last row is c / ‖c‖, so that the last row of H Q is the direction c Q."""
    u = c / torch.linalg.vector_norm(c)
    sign = -1.0 if float(u[-1]) > 0 else 1.0  # away from cancellation
    h = u.clone()
    h[-1] -= sign
    h = h * (2**0.5 / torch.linalg.vector_norm(h))  # H = I − h hᵀ
    turned = []
    for M in (Q, C):
        g = h.to(M)
        M = torch.addr(M, g, g @ M, alpha=-1)
        M[-1] *= sign
        turned.append(M)
    return turned[0], turned[1]
