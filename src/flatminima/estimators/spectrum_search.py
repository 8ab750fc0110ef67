"""The search for eigenpairs: which directions to expand next, when to cut back, and when nothing can have been missed."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from flatminima._progress import Progress
from flatminima.estimators.checkpoint import Checkpoint
from flatminima.estimators.krylov import KrylovSpace
from flatminima.estimators.missed_copies import Bounds, MissedCopies, bound_beyond
from flatminima.estimators.orthogonality import length, orthogonalise

__all__ = ["AT_ONCE", "Found", "Goal", "search"]

#: Most vectors that are multiplied at once, other than those of a block step.
AT_ONCE = 16
#: Missed values nearer to the wanted ones than this part of the spectrum may be let go after as many steps as the search took:
#: after a start that is not random, and after a random one, which misses nothing but copies.
_RESOLUTION = 1e-3
_COARSE_RESOLUTION = 1e-2
#: A unit vector further from the space than this is an own direction; nearer ones have been improved.
_ELSEWHERE = 0.3
_OWN_NUMBERS = ("is_met", "has_added_starts", "longest_check", "_next_look")
_OWN_TENSORS = ("_images", "_start_S", "_checked")


@final
@dataclass(frozen=True)
class Goal:
    """What is wanted of the spectrum, and what may be spent on it.

    Attributes:
        which: "LA", "SA", "LM" or "BE".
        k: Pairs per end.
        num_pairs: Pairs in all.
        rtol: Residual to reach, relative to the largest Ritz value's magnitude.
        block_size: Most vectors that are multiplied at once.
        num_random: Number of random start vectors; None if other vectors were given.
        max_products: Most products of the search.
        deadline: Clock reading after which no step is taken once there are ``num_pairs`` basis vectors.
        progress: Told the number of products.
    """

    which: str
    k: int
    num_pairs: int
    rtol: float
    block_size: int
    num_random: int | None
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

    def bounds(self, wanted: Tensor, scale: float) -> Bounds:
        """Return beyond which values a missed eigenvalue would change the wanted ones by more than twice the tolerance.

        Args:
            wanted: Wanted Ritz values, ``(num_pairs,)``, in the order of :meth:`ranking`.
            scale: Largest Ritz value's magnitude.
        """
        slack = 2 * max(self.rtol, 1e-15) * scale
        if self.which == "LM":
            bound = bound_beyond(wanted.abs(), slack, self.num_random)
            return bound, None if bound is None else -bound
        top = None if self.which == "SA" else bound_beyond(wanted[0::2] if self.which == "BE" else wanted, slack, self.num_random)
        if self.which == "LA":
            return top, None
        low = bound_beyond(-(wanted[1::2] if self.which == "BE" else wanted), slack, self.num_random)
        return top, None if low is None else -low


@final
@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        S: Coefficients ``(m, num_pairs)`` of the wanted Ritz vectors in the first m basis vectors.
        is_met: Whether the goal is met.
        images: A times these basis vectors, as rows ``(m, n)``, where no other vectors were needed; None otherwise.
    """

    S: Tensor
    is_met: bool
    images: Tensor | None


def search(space: KrylovSpace, goal: Goal, checkpoint: Checkpoint, starts: Tensor | None = None) -> Found:
    """Grow the space until the goal is met or its limits are reached.

    Args:
        space: A space with at least one chain; or an empty one, where the checkpoint has a state.
        goal: What is wanted.
        checkpoint: Keeps the state of the space and of the search.
        starts: Vectors, as rows ``(p, n)``, near the wanted eigenvectors. The first chain should be a combination of them. If its
            product says that they are eigenvectors already, all are taken in at once; otherwise those that are not in the space
            when all pairs have converged, such as copies, are chains of their own then.
    """
    state = _Search(space, goal, starts)
    kept = checkpoint.load("search")
    if kept is not None:
        state.restore(kept.tensors, kept.numbers)
    while not (state.is_met or state.is_out_of_budget()):
        chains = state.next_chains()
        if not chains:
            break
        state.step(chains)
        if state.is_due():
            state.look()
        checkpoint.keep("search", *state.state())
    return state.found()


@final
class _Search:
    """What the search knows between two steps."""

    def __init__(self, space: KrylovSpace, goal: Goal, starts: Tensor | None) -> None:
        self.space, self.goal, self.starts = space, goal, starts
        self.fresh = list(space.chains)
        self.is_met = False
        self.check: MissedCopies | None = None
        self.longest_check = 0
        self._checked: Tensor | None = None
        self._ranked: list[int] = []
        self._next_look = 1
        self.has_added_starts = starts is None
        # A times the basis vectors, while they are few, and the coefficients of the pairs that were found in those
        self._images: Tensor | None = None if starts is None else starts[:0]
        self._start_S: Tensor | None = None

    def next_chains(self) -> list[int]:
        """Return the chains to expand; a new random one where all have ended; nothing where nothing is left."""
        space, goal = self.space, self.goal
        room = min(space.max_dimension - space.dimension, max(1, goal.max_products - space.num_products))
        self.fresh = [chain for chain in self.fresh if chain in space.chains]
        if self.fresh:
            first, self.fresh = self.fresh[: min(room, AT_ONCE)], self.fresh[min(room, AT_ONCE) :]
            return first
        chains = space.chains
        if not chains and not self.has_added_starts and self._add_starts():
            return self.next_chains()
        if not chains:
            new = space.start()
            return [] if new is None else [new]
        if self.check is not None and self.check.chain in chains and self._ranked[:1] == [self.check.chain]:
            return self._ranked[:1]
        ranked = [chain for chain in self._ranked if chain in chains]
        ranked += [chain for chain in reversed(chains) if chain not in ranked]
        return ranked[: min(room, goal.block_size)]

    def step(self, chains: list[int]) -> None:
        """Expand the chains."""
        products = self.space.expand(chains)
        if self._images is not None and self._start_S is None:
            is_short = self.starts is not None and self.space.dimension <= self.goal.num_pairs + len(self.starts)
            self._images = torch.cat([self._images, products]) if is_short else None
        if self.starts is not None and self.space.num_products == len(chains):
            self._try_starts(products[0])
        if self.check is not None and self.check.chain in chains:
            self.check.record(*self.space.recursion(self.check.chain))

    def is_due(self) -> bool:
        """Tell whether to look at the Ritz values: after a growth by a 50th, and where the space has to change."""
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
        is_converged = space.residuals(S[:, wanted]) <= goal.rtol * scale
        has_all = wanted.numel() == goal.num_pairs and bool(is_converged.all())
        goal.progress(space.num_products, None, f"eigenpairs: {int(is_converged.sum())} of {goal.num_pairs} converged")
        if has_all and not self.has_added_starts and not space.is_full and self._add_starts():
            return
        if has_all and self._images is not None and self._start_S is None:
            self._start_S = S[:, wanted]
        if self._checked is not None and self._have_changed(values[wanted], scale):
            self._images = self._start_S = None
        if space.is_full:
            self.is_met = True
        elif has_all:
            self._settle(values[wanted], scale)
        else:
            open_pairs = S if bool(is_converged.all()) else S[:, wanted[~is_converged]]
            leaving = space.leaving(open_pairs).abs().amax(1)
            self._ranked = [space.chains[i] for i in leaving.argsort(descending=True, stable=True)]
        if not self.is_met and space.dimension == space.max_dimension and not self.is_out_of_budget():
            kept = ranking[: goal.num_pairs + max(1, (space.max_dimension - goal.num_pairs) // 2)].sort().values
            self._cut_back(values[kept], S[:, kept], goal.bounds(values[wanted], scale))
        self._next_look = space.dimension + max(1, space.dimension // 50)

    def _try_starts(self, w: Tensor) -> None:
        """Take in all given vectors at once if w = A v, v their combination, stays in their span to within the tolerance."""
        assert self.starts is not None
        span = torch.linalg.qr(self.starts.T)[0].T
        if length(orthogonalise(w, span)[0]) <= self.goal.rtol * length(w):
            self.has_added_starts = True
            chains = [self.space.start(v) for v in self.starts[1:]]
            self.fresh += [chain for chain in chains if chain is not None]

    def _add_starts(self) -> bool:
        """Begin a chain with every given vector that is not in the space yet; tell whether there is one."""
        self.has_added_starts = True
        assert self.starts is not None
        for v in self.starts:
            if self.space.distance(v) > _ELSEWHERE:
                chain = self.space.start(v)
                self.fresh += [] if chain is None else [chain]
        return bool(self.fresh)

    def _settle(self, found: Tensor, scale: float) -> None:
        """Go on with the check for missed copies, or begin one, or be content."""
        space, goal = self.space, self.goal
        bounds = goal.bounds(found, scale)
        if bounds == (None, None):
            self.is_met = True
            return
        if self._checked is None:
            # from a random start, so many steps bring the copies to convergence too, unless the space was near its end
            resolution = _RESOLUTION if goal.num_random is None else _COARSE_RESOLUTION
            self.longest_check = max(space.num_products, math.ceil(_steps_to_show(resolution, space.A.size)))
        if self._checked is None or self._have_changed(found, scale):
            self._checked = found
            self.check = MissedCopies(space.start())
        assert self.check is not None
        has_ended = self.check.chain not in space.chains
        is_long = self.check.num_steps >= self.longest_check
        self.is_met = has_ended or is_long or self.check.has_excluded(bounds, space.A.size)
        self._ranked = [] if self.check.chain is None else [self.check.chain]

    def _have_changed(self, found: Tensor, scale: float) -> bool:
        """Tell whether values ``(num_pairs,)`` differ from those that are being checked."""
        assert self._checked is not None
        return bool(((found - self._checked).abs() > 2 * self.goal.rtol * scale).any())

    def _cut_back(self, values: Tensor, S: Tensor, bounds: Bounds) -> None:
        self.space.restart(values, S)
        self._images = self._start_S = None
        if self.check is not None:
            self.check.cut(bounds)

    def found(self) -> Found:
        """Return the most wanted Ritz vectors."""
        if self._start_S is not None:
            return Found(self._start_S, self.is_met, self._images)
        values, S = self.space.ritz()
        return Found(S[:, self.goal.ranking(values)[: self.goal.num_pairs]], self.is_met, None)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what :meth:`restore` needs."""
        tensors, numbers = self.space.state()
        for name in _OWN_TENSORS:
            if getattr(self, name) is not None:
                tensors[name] = getattr(self, name)
        own = {name: getattr(self, name) for name in _OWN_NUMBERS}
        check = None if self.check is None else self.check.state()
        return tensors, {"space": numbers, "search": own | {"fresh": self.fresh[:], "_ranked": self._ranked[:]}, "check": check}

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Go on from an earlier state."""
        self.space.restore(tensors, numbers["space"])
        for name in _OWN_TENSORS:
            kept = tensors.get(name)
            setattr(self, name, kept if kept is None or name == "_images" else kept.cpu())
        vars(self).update(numbers["search"])
        self.check = None if numbers["check"] is None else MissedCopies.restored(numbers["check"])


def _steps_to_show(gap: float, size: int) -> float:
    """Return the degree at which a Chebyshev polynomial lifts a weight 1/√n beyond the gap to 10 times the rest."""
    return math.acosh(10 * math.sqrt(size)) / math.acosh(1 + 2 * gap)
