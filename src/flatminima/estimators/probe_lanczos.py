"""Lanczos recursions from several probes side by side: one block of products a step, one tridiagonal matrix a probe."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from flatminima.estimators.gauss_quadrature import JacobiMatrix
from flatminima.estimators.orthogonality import breakdown_tolerance, length, orthogonalise, working_dtype
from flatminima.estimators.sampling import check_finite
from flatminima.operators.base import LinearOperator

__all__ = ["MIN_STEPS", "ProbeGroup", "group_width"]

#: Fewest steps of a probe that stops by itself: two before and two after the first that give its four moments exactly.
MIN_STEPS = 4
_BASIS_BYTES = 2**28
_ROWS = 64
_AT_ONCE = 8


def group_width(A: LinearOperator) -> int:
    """Return how many probes run side by side: up to 8, as many as keep their bases within 256 MiB."""
    return max(1, min(_AT_ONCE, _BASIS_BYTES // (_ROWS * A.size * working_dtype(A.dtype).itemsize)))


@final
class ProbeGroup:
    """Lanczos recursions from the columns of V, in the complement of known eigenvectors.

    Each new vector is orthogonalised twice against the probe's earlier ones, or the newest of them where all would take more
    than 256 MiB; eigenvalues found twice then share the weight of one, and the quadrature stays right (Greenbaum 1989).
    """

    def __init__(self, A: LinearOperator, width: int, known: Tensor, max_steps: int) -> None:
        """Make room for that many probes; ``known`` are orthonormal rows ``(k, n)``."""
        self.A, self.known = A, known
        self.max_steps = min(max_steps, A.size - known.shape[0])
        dtype = working_dtype(A.dtype)
        capacity = max(2, min(self.max_steps, _BASIS_BYTES // (width * A.size * dtype.itemsize)))
        self.bases = [torch.empty(capacity, A.size, dtype=dtype, device=A.device) for _ in range(width)]
        self.jacobis = [JacobiMatrix() for _ in self.bases]
        self.active = list(range(width))
        self.num_products = 0
        self.scale = 0.0

    def start(self, V: Tensor) -> None:
        """Start from the columns of V ``(n, p)``, less what is known."""
        for basis, v in zip(self.bases, V.T.to(self.known.dtype), strict=True):
            w = v / length(v)
            for _ in range(2):  # once more at its new length: w may lie almost in the span of what is known
                w = self._without_known(w)
                w = w / length(w)
            basis[0] = w

    def run(
        self,
        is_settled: Callable[[Sequence[JacobiMatrix]], list[bool]] | None,
        deadline: float,
        after_step: Callable[[ProbeGroup], None],
    ) -> None:
        """Step until every probe has settled, broken down, or reached the most steps.

        Args:
            is_settled: Says of each probe whether it needs no further step; None for the most steps.
            deadline: Clock reading after which no probe takes more than the fewest steps.
            after_step: Called after each step.
        """
        while self.active:
            self._step()
            steps = self.jacobis[self.active[0]].num_steps
            is_last = steps >= self.max_steps or (steps >= MIN_STEPS and time.monotonic() > deadline)
            done = [is_last] * len(self.jacobis)
            if is_settled is not None and steps >= MIN_STEPS and not is_last:
                done = is_settled(self.jacobis)
            self.active = [i for i in self.active if not (done[i] or self.jacobis[i].is_exact)]
            after_step(self)

    def _step(self) -> None:
        capacity = self.bases[0].shape[0]
        place = self.jacobis[self.active[0]].num_steps % capacity
        V = torch.stack([self.bases[i][place] for i in self.active], dim=1)
        products = check_finite(self.A @ V.to(self.A.dtype)).T.to(V.dtype)
        self.num_products += len(self.active)
        for i, w in zip(self.active, products.contiguous(), strict=True):
            self.scale = max(self.scale, length(w))
            self._advance(self.jacobis[i], self.bases[i], w)

    def _advance(self, jacobi: JacobiMatrix, basis: Tensor, w: Tensor) -> None:
        capacity = basis.shape[0]
        step = jacobi.num_steps
        w = self._without_known(w)
        w, coefficients = orthogonalise(w, basis[: min(step + 1, capacity)])
        w = self._without_known(w)  # again at its new length, which may be small
        jacobi.alphas.append(float(coefficients[step % capacity]))
        beta = length(w)
        is_full = step + 1 == self.A.size - len(self.known)
        jacobi.is_exact = is_full or beta <= breakdown_tolerance(self.A.dtype) * self.scale
        if not jacobi.is_exact:
            jacobi.betas.append(beta)
            if step + 1 < self.max_steps:
                basis[(step + 1) % capacity] = w / beta

    def _without_known(self, w: Tensor) -> Tensor:
        return w - (self.known @ w) @ self.known if len(self.known) else w

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what a later call of :meth:`restore` needs."""
        tensors = {}
        for i in self.active:
            used = min(self.jacobis[i].num_steps + 1, self.bases[i].shape[0])
            # a full ring is written again: a copy is kept of it
            tensors[f"basis {i}"] = self.bases[i].clone() if used == self.bases[i].shape[0] else self.bases[i][:used]
        numbers = {
            "jacobis": [[j.alphas[:], j.betas[:], j.is_exact] for j in self.jacobis],
            "active": self.active,
            "max_steps": self.max_steps,
            "num_products": self.num_products,
            "scale": self.scale,
        }
        return tensors, numbers

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Go on from an earlier state."""
        self.jacobis = [JacobiMatrix(*parts) for parts in numbers["jacobis"]]
        self.active, self.num_products, self.scale = numbers["active"], numbers["num_products"], numbers["scale"]
        for i in self.active:
            rows = tensors[f"basis {i}"]
            self.bases[i][: len(rows)] = rows
