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
    :math:`v^\top f(A)\, v`, which is exact for polynomials f up to degree 2m − 1 (Golub & Meurant 2010, ch. 3 and 6). The m
    products tell β_m as well. With it and *any* α in its last place T_{m+1} gives a rule of m + 1 nodes that is exact up to
    degree 2m, the closed rule: a Gauss–Radau rule is the case in which α puts a node at a given place.

    Attributes:
        alphas: Diagonal.
        betas: Off-diagonal β_1 … β_m; without β_m where ``is_exact``.
        is_exact: Whether the Krylov space is invariant, so that the rule is exact for every f.
    """

    alphas: list[float] = field(default_factory=list)
    betas: list[float] = field(default_factory=list)
    is_exact: bool = False
    _rules: dict[tuple[int, float | None], GaussRule] = field(default_factory=dict, repr=False)

    @property
    def num_steps(self) -> int:
        """Number m of steps."""
        return len(self.alphas)

    def rule(self, num_steps: int | None = None, *, lowest: float | None = None) -> GaussRule:
        """Return the rule after that many steps; after all of them by default.

        Args:
            num_steps: m.
            lowest: For the closed rule: what no eigenvalue is below, or −inf; None for the Gauss rule. The last α is α_m, or as
                near to it as leaves the nodes where A's eigenvalues may be by this and by the residuals of the Ritz values.
        """
        m = self.num_steps if num_steps is None else num_steps
        if len(self.betas) < m:
            lowest = None
        if (m, lowest) not in self._rules:
            alphas, betas = self.alphas[:m], self.betas[: m - 1]
            if lowest is not None:
                alphas, betas = [*alphas, self._last_alpha(m, lowest)], [*betas, self.betas[m - 1]]
            nodes, S = _eigh(alphas, betas)
            weights = S[0] ** 2
            self._rules = {key: kept for key, kept in self._rules.items() if key[0] >= m - 2}
            self._rules[m, lowest] = GaussRule(nodes, weights / weights.sum())
        return self._rules[m, lowest]

    def _last_alpha(self, m: int, lowest: float) -> float:
        r"""Return α for the closed rule: α_m, brought between the values that put a node at the ends [a, b] of the spectrum.

        Those are :math:`a + \beta_m^2\, e^\top (T_m - a)^{-1} e` and :math:`b - \beta_m^2\, e^\top (b - T_m)^{-1} e`.
        """
        nodes, S = _eigh(self.alphas[:m], self.betas[: m - 1])
        overlaps = self.betas[m - 1] * S[-1].abs()  # residuals of the Ritz values
        low, high = max(lowest, float(nodes[0] - overlaps[0])), float(nodes[-1] + overlaps[-1])
        least = low + float((overlaps.square() / (nodes - low)).nan_to_num(0.0, 0.0, 0.0).sum())
        most = high - float((overlaps.square() / (high - nodes)).nan_to_num(0.0, 0.0, 0.0).sum())
        return max(least, min(most, self.alphas[m - 1]))


def _eigh(alphas: list[float], betas: list[float]) -> tuple[Tensor, Tensor]:
    T = torch.diag(torch.tensor(alphas, dtype=torch.float64)) + torch.diag(torch.tensor(betas, dtype=torch.float64), -1)
    nodes, S = torch.linalg.eigh(T)  # reads the lower triangle
    return nodes, S


def transport_distance(first: GaussRule, second: GaussRule) -> float:
    """Return how far the mass of one measure has to be moved, on average, to become the other (1-Wasserstein)."""
    nodes, order = torch.cat([first.nodes, second.nodes]).sort()
    surplus = torch.cat([first.weights, -second.weights])[order].cumsum(0)
    return float((surplus[:-1].abs() * nodes.diff()).sum())


def without_noise(nodes: Tensor, floor: float) -> Tensor:
    """Return the nodes with those of magnitude ``floor`` or less set to 0."""
    return torch.where(nodes.abs() <= floor, torch.zeros_like(nodes), nodes)
