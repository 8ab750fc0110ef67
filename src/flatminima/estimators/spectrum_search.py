"""The search for eigenpairs: which direction to expand next, when to cut back, and when nothing can have been missed."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from flatminima._progress import Progress
from flatminima.estimators.krylov import KrylovSpace

__all__ = ["Goal", "search"]

#: Fewest steps of a check for missed copies: the range of the spectrum is not known before.
_MIN_CHECK = 5
#: Missed values nearer to the wanted ones than this part of the other values' range may be let go after a short search.
_RESOLUTION = 1e-3


@final
@dataclass(frozen=True)
class Goal:
    """What is wanted of the spectrum, and what may be spent on it.

    Attributes:
        which: "LA", "SA", "LM" or "BE".
        k: Pairs per end.
        num_pairs: Pairs in all.
        rtol: Residual to reach, relative to the largest Ritz value's magnitude.
        max_products: Most products of the search.
        deadline: Clock reading after which no step is taken once there are ``num_pairs`` basis vectors.
        progress: Told the number of products.
    """

    which: str
    k: int
    num_pairs: int
    rtol: float
    max_products: int
    deadline: float
    progress: Progress

    def ranking(self, values: Tensor) -> Tensor:
        """Return indices of ascending values, the most wanted first."""
        m = values.numel()
        ascending = torch.arange(m)
        if self.which == "LA":
            return ascending.flip(0)
        if self.which == "SA":
            return ascending
        if self.which == "LM":
            return values.abs().argsort(descending=True, stable=True)
        return torch.stack([ascending.flip(0), ascending], dim=1).reshape(-1)[:m]  # top, bottom, top, …

    def check_length(self, wanted: Tensor, rest: Tensor, slack: Tensor, size: int) -> float:
        """Return the steps after which a random vector shows any eigenvalue beyond the wanted ones.

        Args:
            wanted: Wanted Ritz values, ``(num_pairs,)``, in the order of :meth:`ranking`.
            rest: The other Ritz values, ``(r,)``, ascending.
            slack: Their residuals, ``(r,)``: the spectrum may reach that much further.
            size: Number of rows n.
        """
        if not rest.numel():
            return math.inf
        low, high = float((rest - slack).min()), float((rest + slack).max())
        top, bottom = float(wanted.min()), float(wanted.max())
        if self.which == "LM":
            top, bottom = float(wanted.abs().min()), -float(wanted.abs().min())
        elif self.which == "BE":
            top, bottom = float(wanted[0::2].min()), float(wanted[1::2].max())
        gaps = {"LA": [top - high], "SA": [low - bottom]}.get(self.which, [top - high, low - bottom])
        width = high - low
        if min(gaps) <= 1e-12 * width:
            return math.inf
        return _steps_to_show(min(gaps) / width, size) if width > 0 else 0.0


def _steps_to_show(gap: float, size: int) -> float:
    """Return the degree at which a Chebyshev polynomial lifts a weight 1/√n beyond the gap to 10 times the rest."""
    return math.acosh(10 * math.sqrt(size)) / math.acosh(1 + 2 * gap)


def search(space: KrylovSpace, goal: Goal, *, is_random: bool) -> tuple[Tensor, bool]:
    """Grow the space until the goal is met or its limits are reached.

    Args:
        space: A space with at least one chain.
        goal: What is wanted.
        is_random: Whether the chain's start was random, so that it misses nothing but copies.

    Returns:
        Coefficients S ``(m, num_pairs)`` of the wanted Ritz vectors, and whether the goal is met.
    """
    state = _Search(space, goal, is_random)
    while True:
        chain = state.next_chain()
        if chain is None:
            break
        space.expand(chain)
        state.num_steps += chain == state.check_chain
        if state.is_due():
            state.look()
            if state.is_met or state.is_out_of_budget():
                break
    return state.wanted_vectors(), state.is_met


@final
class _Search:
    """What the search knows between two steps."""

    def __init__(self, space: KrylovSpace, goal: Goal, is_random: bool) -> None:
        self.space, self.goal = space, goal
        self.fresh = list(space.chains)
        self.needs_check = not is_random or goal.k > 1
        self.longest_check = _steps_to_show(_RESOLUTION, space.A.size)
        self.is_met = False
        self.check_chain: int | None = None
        self.num_steps = 0
        self._checked: Tensor | None = None
        self._favourite: int | None = None
        self._next_look = 1

    def next_chain(self) -> int | None:
        """Return the chain to expand; a new random one where all have ended; None where nothing is left."""
        while self.fresh:
            chain = self.fresh.pop(0)
            if chain in self.space.chains:
                return chain
        chains = self.space.chains
        if not chains:
            return self.space.start()
        return self._favourite if self._favourite in chains else chains[-1]

    def is_due(self) -> bool:
        """Tell whether to look at the Ritz values: after a growth by a 20th, and where the space has to change."""
        space = self.space
        must = space.is_full or space.dimension == space.max_dimension or not space.chains
        out = self.is_out_of_budget()
        return must or out or (not self.fresh and space.dimension >= self._next_look)

    def is_out_of_budget(self) -> bool:
        space, goal = self.space, self.goal
        if space.dimension < goal.num_pairs:
            return False
        return space.num_products >= goal.max_products or time.monotonic() > goal.deadline

    def look(self) -> None:
        """Take stock: what has converged, where to go on, whether to cut back."""
        space, goal = self.space, self.goal
        values, S = space.ritz()
        ranking = goal.ranking(values)
        wanted = ranking[: goal.num_pairs]
        scale = float(values.abs().max())
        residuals = space.residuals(S)
        is_converged = residuals[wanted] <= goal.rtol * scale
        goal.progress(space.num_products, None, f"eigenpairs: {int(is_converged.sum())} of {goal.num_pairs} converged")
        self._favourite = None
        if space.is_full:
            self.is_met = True
        elif wanted.numel() == goal.num_pairs and bool(is_converged.all()):
            self._settle(values, wanted, residuals, scale)
        else:
            open_pairs = S[:, wanted[~is_converged]] if not bool(is_converged.all()) else S
            leaving = {chain: float(part.max()) for chain, part in space.leaving(open_pairs).items()}
            self._favourite = max(leaving, key=lambda chain: leaving[chain]) if leaving else None
        if not self.is_met and space.dimension == space.max_dimension and not self.is_out_of_budget():
            kept = ranking[: goal.num_pairs + max(1, (space.max_dimension - goal.num_pairs) // 2)]
            kept = kept.sort().values
            space.restart(values[kept], S[:, kept])
        self._next_look = space.dimension + max(1, space.dimension // 20)

    def _settle(self, values: Tensor, wanted: Tensor, residuals: Tensor, scale: float) -> None:
        """Go on with the check for missed copies, or begin one, or be content."""
        space, goal = self.space, self.goal
        if not self.needs_check:
            self.is_met = True
            return
        if self._checked is None:
            # from a random start, so many steps bring the copies to convergence too, unless the space was near its end
            self.longest_check = max(self.longest_check, float(space.num_products))
        found = values[wanted]
        if self._checked is None or bool(((found - self._checked).abs() > 2 * goal.rtol * scale).any()):
            self._checked, self.num_steps = found, 0
            self.check_chain = space.start()
        rest = torch.ones_like(values, dtype=torch.bool)
        rest[wanted] = False
        length = goal.check_length(found, values[rest], residuals[rest], space.A.size)
        has_ended = self.check_chain not in space.chains
        self.is_met = has_ended or self.num_steps >= max(_MIN_CHECK, min(length, self.longest_check))
        self._favourite = self.check_chain

    def wanted_vectors(self) -> Tensor:
        """Return the coefficients of the most wanted Ritz vectors."""
        values, S = self.space.ritz()
        return S[:, self.goal.ranking(values)[: self.goal.num_pairs]]
