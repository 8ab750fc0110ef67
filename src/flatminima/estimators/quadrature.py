"""Quadrature: what stochastic Lanczos quadrature has found of a spectrum."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from flatminima.estimators.deflation import Known
from flatminima.estimators.gauss_quadrature import GaussRule, JacobiMatrix, without_noise

__all__ = ["Quadrature"]


@final
@dataclass(frozen=True, eq=False)
class Quadrature:
    """What was found.

    Attributes:
        size: Number n of rows.
        known: Eigenvalues that were not sampled.
        jacobis: One tridiagonal matrix a probe, of the other n − k dimensions.
        noise_floor: Magnitude up to which an eigenvalue is zero within rounding.
        num_products: All products made.
        converged: Whether the errors met the tolerance.
        closed: Whether its rules are closed ones.
    """

    size: int
    known: Known
    jacobis: tuple[JacobiMatrix, ...]
    noise_floor: float
    num_products: int
    converged: bool
    closed: bool = False

    @property
    def rules(self) -> list[GaussRule]:
        """The probes' rules."""
        return [jacobi.rule(lowest=self.lowest) for jacobi in self.jacobis]

    @cached_property
    def lowest(self) -> float | None:
        """What no node of a closed rule may be below: zero, to rounding, while nothing negative was seen; None without them."""
        if not self.closed:
            return None
        seen = [self.known.values, *(jacobi.rule().nodes for jacobi in self.jacobis)]
        return -self.noise_floor / 2 if float(torch.cat(seen).min()) >= -self.noise_floor else -math.inf

    @property
    def share(self) -> float:
        """Share of the spectrum that is sampled."""
        return (self.size - self.known.count) / self.size

    def samples(self, columns: Callable[[Tensor], Tensor]) -> Tensor:
        """Return each probe's mean of the columns over the spectrum, ``(p, c)``; one row where nothing was sampled."""
        return self.samples_before(columns, (0,))[0]

    def samples_before(self, columns: Callable[[Tensor], Tensor], steps: tuple[int, ...]) -> Tensor:
        """Return the samples as they were so many steps before, ``(len(steps), p, c)``. An exact rule is what it was."""
        fixed = columns(without_noise(self.known.values, self.noise_floor)).sum(0) / self.size
        if not self.jacobis:
            return fixed.expand(len(steps), 1, -1)
        rules = [
            j.rule(max(1, j.num_steps - (0 if j.is_exact else back)), lowest=self.lowest) for back in steps for j in self.jacobis
        ]
        owners = torch.arange(len(rules)).repeat_interleave(torch.tensor([len(rule.nodes) for rule in rules]))
        G = columns(without_noise(torch.cat([rule.nodes for rule in rules]), self.noise_floor))
        terms = torch.cat([rule.weights for rule in rules])[:, None] * G
        means = torch.zeros(len(rules), G.shape[1], dtype=torch.float64).index_add_(0, owners, terms)
        return (fixed + self.share * means).reshape(len(steps), len(self.jacobis), -1)
