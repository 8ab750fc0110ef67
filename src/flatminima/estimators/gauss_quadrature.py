"""Gauss quadrature from tridiagonal matrices: what a Lanczos recursion says about the spectrum as its start vector sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

__all__ = ["NOISE", "GaussRule", "JacobiMatrix", "transport_distance", "without_noise"]

#: An eigenvalue below this many eps times the largest |λ| is zero within the rounding of the products.
NOISE = 20.0


@final
@dataclass(frozen=True, eq=False)
class GaussRule:
    r"""Nodes and weights such that :math:`\sum_k w_k f(\lambda_k) \approx \int f\,d\mu` for a probability measure μ.

    Attributes:
        nodes: Shape ``(m,)``, ascending, float64 on the CPU.
        weights: Shape ``(m,)``, sum 1.
    """

    nodes: Tensor
    weights: Tensor

    @property
    def spread(self) -> float:
        """Standard deviation of the measure."""
        mean = (self.weights * self.nodes).sum()
        return float((self.weights * (self.nodes - mean) ** 2).sum().sqrt())


@final
@dataclass(eq=False)
class JacobiMatrix:
    r"""The tridiagonal matrix T_m of m Lanczos steps from a unit vector v; it grows with the steps.

    Its eigenvalues are the nodes and the squared first entries of its eigenvectors the weights of the Gauss rule for
    :math:`v^\top f(A)\, v`, which is exact for polynomials f up to degree 2m − 1 (Golub & Meurant 2010, ch. 3 and 6).

    Attributes:
        alphas: Diagonal.
        betas: Off-diagonal.
        is_exact: Whether the Krylov space is invariant, so that the rule is exact for every f.
    """

    alphas: list[float] = field(default_factory=list)
    betas: list[float] = field(default_factory=list)
    is_exact: bool = False
    _rules: dict[int, GaussRule] = field(default_factory=dict, repr=False)

    @property
    def num_steps(self) -> int:
        """Number m of steps."""
        return len(self.alphas)

    def rule(self, num_steps: int | None = None) -> GaussRule:
        """Return the Gauss rule after that many steps; after all of them by default."""
        m = self.num_steps if num_steps is None else num_steps
        if m not in self._rules:
            diagonal = torch.tensor(self.alphas[:m], dtype=torch.float64)
            off_diagonal = torch.tensor(self.betas[: m - 1], dtype=torch.float64)
            nodes, S = torch.linalg.eigh(torch.diag(diagonal) + torch.diag(off_diagonal, -1))  # reads the lower triangle
            weights = S[0] ** 2
            self._rules = {k: kept for k, kept in self._rules.items() if k >= m - 2}
            self._rules[m] = GaussRule(nodes, weights / weights.sum())
        return self._rules[m]


def transport_distance(first: GaussRule, second: GaussRule) -> float:
    """Return how far the mass of one measure has to be moved, on average, to become the other (1-Wasserstein)."""
    nodes, order = torch.cat([first.nodes, second.nodes]).sort()
    surplus = torch.cat([first.weights, -second.weights])[order].cumsum(0)
    return float((surplus[:-1].abs() * nodes.diff()).sum())


def without_noise(nodes: Tensor, floor: float) -> Tensor:
    """Return the nodes with those of magnitude ``floor`` or less set to 0."""
    return torch.where(nodes.abs() <= floor, torch.zeros_like(nodes), nodes)
