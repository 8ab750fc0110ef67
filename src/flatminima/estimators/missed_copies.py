r"""The check for missed copies: what a random direction's Lanczos recursion says about eigenvalues that it has *not* shown.

A Krylov space sees one direction of each eigenspace, so copies of an eigenvalue lie in its orthogonal complement, and there
they are eigenvectors of the compression B of A to that complement. A recursion with B from a random unit vector q, with
coefficients α_i, β_i and Ritz values θ_i after j steps, has the polynomial p_j(x) = ∏ (x − θ_i), and

.. math:: \prod_i \beta_i = \|p_j(B)\, q\| \ge |p_j(\mu)|\, |u^\top q| \qquad\text{for every eigenpair } (\mu, u) \text{ of } B.

So if B has an eigenvalue μ beyond a bound τ that lies outside of all θ_i, then |uᵀq| ≤ ∏ β_i / |τ − θ_i|; a random q has so
little of a given u with a probability of at most √(2n/π) times that. The check ends when this is below 1 %. It takes few
steps: what lies next to the wanted eigenvalues is in the space already, and only the rest has to be outgrown.
"""

from __future__ import annotations

import math
from typing import Any, Self, final

import torch
from torch import Tensor

__all__ = ["Bounds", "MissedCopies", "bound_beyond"]

#: Largest probability that a copy that exists stays unseen.
_MISS = 0.01

#: Eigenvalues above the first number or below the second are looked for; None for none.
Bounds = tuple[float | None, float | None]


def bound_beyond(found: Tensor, slack: float, num_chains: int | None) -> float | None:
    """Return above which value a missed eigenvalue would matter, or None if there can be none.

    Args:
        found: The wanted values of one end, ``(k,)``, larger being more wanted.
        slack: Differences up to this do not matter.
        num_chains: Number of random start vectors: only what was found so many times can have a further copy. None if the
            start was not random, so that anything can have been missed.
    """
    last = float(found.min())
    if num_chains is None:
        return last + slack
    copies = ((found[:, None] - found).abs() <= slack).sum(1)
    suspects = found[(found > last + slack) & (copies >= num_chains)]
    return float(suspects.min()) - slack / 2 if suspects.numel() else None


@final
class MissedCopies:
    """One check: a random chain that is followed in the complement of the space."""

    def __init__(self, chain: int | None) -> None:
        """Begin with a chain's number; None where nothing is left outside of the space."""
        self.chain = chain
        self.alphas: list[float] = []
        self.betas: list[float] = []
        self.num_steps = 0
        self._carried = [0.0, 0.0]

    def record(self, alpha: float, beta: float) -> None:
        """Take note of a step of the chain."""
        self.num_steps += 1
        self.alphas.append(alpha)
        self.betas.append(beta)

    def has_excluded(self, bounds: Bounds, size: int) -> bool:
        """Tell whether eigenvalues beyond the bounds would have shown, but for 1 % of all start vectors of n = ``size``."""
        needed = math.log(_MISS) - 0.5 * math.log(2 * size / math.pi)
        evidence = self._log_weights(bounds)
        return all(weight <= needed for weight, bound in zip(evidence, bounds, strict=True) if bound is not None)

    def cut(self, bounds: Bounds) -> None:
        """Begin a new recursion from the chain's candidate, in which an unseen eigenvector has grown by what is known so far."""
        self._carried = self._log_weights(bounds)
        self.alphas, self.betas = [], []

    def _log_weights(self, bounds: Bounds) -> list[float]:
        """Return for each bound the logarithm of the weight that an unseen eigenvector beyond it has in q at most."""
        if not self.alphas:
            return list(self._carried)
        inner = torch.tensor(self.betas[:-1], dtype=torch.float64)
        T = torch.diag(torch.tensor(self.alphas, dtype=torch.float64)) + torch.diag(inner, 1) + torch.diag(inner, -1)
        ritz = torch.linalg.eigvalsh(T)
        growth = sum(math.log(beta) if beta > 0 else -math.inf for beta in self.betas)
        weights = []
        for bound, sign, carried in zip(bounds, (1.0, -1.0), self._carried, strict=True):
            distances = sign * ((bound or 0.0) - ritz)
            is_outside = bound is not None and bool((distances > 0).all())
            weights.append(carried + min(0.0, growth - float(distances.log().sum())) if is_outside else carried)
        return weights

    def state(self) -> dict[str, Any]:
        """Return what :meth:`restored` needs, as JSON values."""
        return {**vars(self), "alphas": self.alphas[:], "betas": self.betas[:]}

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Self:
        """Return the check of that state."""
        check = cls(None)
        vars(check).update(state)
        return check
