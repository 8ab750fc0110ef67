"""Engine: how the products with an objective's matrix are made, by the fastest of the ways that agree.

There are several ways to one product: double backward or forward-over-reverse, the batch at once or in smaller pieces that fit
the processor's caches, one graph for many products. Which is fastest depends on the model and on the number of columns (on
LeNet-5 pieces of 128 images take three quarters of the time that 1,024 at once take; on a wide perceptron they take longer), so
it is found by trial: each way multiplies the first examples of the first batch, and the winner then makes the whole product a
second time. It is kept if both results agree, and remembered for the architecture: runs repeat bit by bit, and products by
themselves from the second on. Another process may choose another way, whose results differ by rounding.

Before any trial a large batch goes in pieces whose graphs stay within a bound of bytes each, where the matrix is a sum over its
examples: graphs of a few examples tell how many fit, and products with them whether they add up. So the memory of a product does
not grow with the batch.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from flatminima.objective import Objective, Piece
from flatminima.objective.batches import batch_size
from flatminima.objective.dependence import tolerance
from flatminima.operators.embedding_bag import twice_differentiable
from flatminima.operators.graphs import PieceProducts, Route, held_bytes

__all__ = ["Engine", "Way"]

#: As many columns make a block, for which other ways may be faster.
_MANY = 4
#: Columns in a run after which a trial is worth its cost, of some ten products.
_SHORT_RUN = 256
#: A product that takes less is not worth a trial, in seconds: for the pass, and for every column.
_WORTH_A_TRIAL = (0.05, 0.01)
#: Seconds a column from which on the other route is tried, where torch has not loaded yet what it needs (a second, and 50 MB).
_WORTH_FORWARD, _DECOMPOSITIONS = 0.12, "torch._decomp.decompositions_for_jvp"
#: By what the base's pieces are divided to try smaller ones, those for single columns up to the second number; fewest examples.
_DIVISORS, _SMALLER, _LEAST = (2, 8), 2, 4
#: Most bytes in the graph of a piece on the CPU, and on devices that are idle with little to do.
_GRAPH_BYTES, _GRAPH_BYTES_ELSEWHERE = 2**25, 2**31
#: Examples of the graphs that tell the bytes of one and whether products add up; a smaller batch is never split for its memory.
_MEASURED = (2, 4)
#: Examples on which a way is tried: so many that graphs which are kept do not all stay in the processor's caches.
_ON_TRIAL = 256
#: A way has to save this share of the time.
_SAVING = 0.07
_COLUMNS_ON_TRIAL, _ROUNDS = 8, 2


@final
@dataclass(frozen=True)
class Way:
    """A way to a product.

    Attributes:
        route: Name of the route through autograd.
        piece_size: Most examples at a time; None for whole batches.
    """

    route: str
    piece_size: int | None = None

    def __str__(self) -> str:
        return self.route + (f" in pieces of {self.piece_size}" if self.piece_size else "")


@final
class Engine:
    """The products with one matrix at one point, without its l2 term.

    Args:
        objective: The loss.
        theta: The point ``(n,)``.
        routes: Gives the ways through autograd by name, for one pass over the data. The first is the base, right wherever any
            is; the others may fail.
        name: What is multiplied with; choices are remembered under it.
        splits: Whether the matrix is a sum over the examples of a batch too, if the loss is.
    """

    def __init__(
        self, objective: Objective, theta: Tensor, routes: Callable[[], Mapping[str, Route]], name: str, *, splits: bool = True
    ) -> None:
        self.objective, self.theta, self.routes, self.name = objective, theta, routes, name
        self._splits = splits and objective.adds_up
        self._names = tuple(routes())
        self._max_bytes = 0
        self._is_keeping = False
        self._columns = {False: 0, True: 0}  # multiplied in this run, by themselves and in blocks
        self._kept: dict[Way, list[PieceProducts]] = {}

    @contextmanager
    def keeping(self, max_bytes: int) -> Iterator[None]:
        """Keep the graphs of all pieces from the first product to the end of the block, if they take at most so many bytes."""
        if self._is_keeping or not self.objective.has_model:  # a closure's parameters are the user's own and change under a graph
            yield
            return
        self._is_keeping, self._max_bytes, self._columns = True, max_bytes, {False: 0, True: 0}
        try:
            yield
        finally:
            self._is_keeping, self._max_bytes, self._kept = False, 0, {}

    @property
    def base(self) -> Way:
        """The way that needs no trial: double backward, in pieces whose graphs stay within the bound where one must be split."""
        bound = _GRAPH_BYTES if self.theta.device.type == "cpu" else _GRAPH_BYTES_ELSEWHERE
        return Way(self._names[0], self.fitting_piece_size(bound))

    def fitting_piece_size(self, bound: int) -> int | None:
        """Return the power of two of examples whose graph takes so many bytes at most; None for batches that must stay whole."""
        if not self._splits or not self.objective.has_model:
            return None
        known: dict[tuple[str, int, int], int | None] = self.objective.architecture.setdefault("piece sizes", {})
        key = (self.name, len(self.theta), bound)
        if key in known:
            return known[key]
        sizes: list[int | None] = []

        def on_first_batch(piece: Piece) -> Tensor:
            if not sizes:
                sizes.append(self._fitting(piece, bound))
            return self.theta.new_zeros(())

        twice_differentiable(self.objective, lambda: self.objective.integrate_pieces(on_first_batch, self.theta))
        known[key] = sizes[0]
        return sizes[0]

    def _fitting(self, piece: Piece, bound: int) -> int | None:
        few, more = _MEASURED
        size, route = batch_size(piece.batch), self.routes()[self._names[0]]
        if size <= more:
            return None
        try:
            part, whole = route(piece.examples(0, few)), route(piece.examples(0, more))
            each = (sum(held_bytes(whole.roots).values()) - sum(held_bytes(part.roots).values())) / (more - few)
            if each * size <= bound:
                return None
            generator = torch.Generator(self.theta.device).manual_seed(0)
            v = torch.empty(len(self.theta), 1, dtype=self.theta.dtype, device=self.theta.device).normal_(generator=generator)
            parts = part.products(v) + route(piece.examples(few, more)).products(v)
            adds_up = bool(parts.any()) and _agree(parts, whole.products(v))
        except Exception:  # the product itself will say what is wrong
            return None
        return 1 << int(math.log2(max(bound / each, 1))) if adds_up else None

    def __call__(self, V: Tensor) -> Tensor:
        """Return the matrix times V ``(n, k)``."""
        many = V.shape[1] >= _MANY
        self._columns[many] += V.shape[1]
        if self._is_keeping and self._columns[many] <= _SHORT_RUN:  # in later runs too, so that they repeat bit by bit
            return self._sum(self.base, V)
        key = (self.name, str(V.dtype), many, self._max_bytes > 0)
        ways: dict[tuple[str, str, bool, bool], Way | None] = self.objective.architecture.setdefault("ways", {})
        if key not in ways and not self._is_keeping:
            ways[key] = None  # the next product is tried
            return self._sum(self.base, V)
        way = ways.get(key)
        if way is None:
            ways[key], result = self._trial(V)
            return result
        return self._sum(way, V)

    def _sum(self, way: Way, V: Tensor) -> Tensor:
        if way in self._kept:
            return self.objective.integrate_again(lambda made: made.products(V), self._kept[way])
        kept: list[PieceProducts] = []
        route = self.routes()[way.route]
        held: dict[int, int] = {}

        def one(piece: Piece) -> Tensor:
            made = route(piece)
            part = made.products(V)
            if self._max_bytes:
                held.update(held_bytes(made.roots, piece.batch))
                kept.append(made)
                if sum(held.values()) > self._max_bytes:
                    self._max_bytes, self._kept = 0, {}
                    kept.clear()
            return part

        objective = self.objective if way.piece_size is None else self.objective.in_pieces(way.piece_size)
        result = twice_differentiable(objective, lambda: objective.integrate_pieces(one, self.theta))
        if kept:
            self._kept[way] = kept
        return result

    def _trial(self, V: Tensor) -> tuple[Way, Tensor]:
        """Return the fastest way, and the product by it. The base has multiplied before, and is warm."""
        base, clock = self.base, _clock(V)
        started = clock()
        result = self._sum(base, V)
        elapsed = clock() - started
        if elapsed < _WORTH_A_TRIAL[0] + _WORTH_A_TRIAL[1] * V.shape[1] or not self.objective.has_model:
            return base, result
        seconds = self._seconds_by_way(V[:, :_COLUMNS_ON_TRIAL], elapsed)
        best = min(seconds, key=lambda way: seconds[way], default=base)
        if best == base or seconds[best] > (1 - _SAVING) * elapsed / (self.objective.num_examples * V.shape[1]):
            return base, result
        self._kept = {}  # not both at a time
        try:
            other = self._sum(best, V)
        except Exception:  # whatever a model does on another route, the base has answered
            other = torch.full_like(result, torch.nan)
        if not _agree(other, result):
            self._kept, best, other = {}, base, result
        return best, other

    def _seconds_by_way(self, V: Tensor, elapsed: float) -> dict[Way, float]:
        """Return the time per example and column of every other way that is worth trying and works, on the first batch."""
        seconds: dict[Way, float] = {}
        can_wait = elapsed < _WORTH_FORWARD * V.shape[1] and _DECOMPOSITIONS not in sys.modules

        def on_first_batch(piece: Piece) -> Tensor:
            for way in () if seconds else self._other_ways(piece, V):
                if can_wait and way.route != self.base.route:
                    continue
                with suppress(Exception):  # a way that fails is no way
                    seconds[way] = min(self._seconds(way, piece, V) for _ in range(1 if V.shape[1] >= _MANY else _ROUNDS))
            return V.new_zeros(())

        twice_differentiable(self.objective, lambda: self.objective.integrate_pieces(on_first_batch, self.theta))
        return seconds

    def _other_ways(self, piece: Piece, V: Tensor) -> Iterator[Way]:
        base, many = self.base, V.shape[1] >= _MANY
        size = min(base.piece_size or math.inf, batch_size(piece.batch))
        parts = {divisor: int(size // divisor) for divisor in _DIVISORS if self._splits and size >= _LEAST * divisor}
        for route in self._names:
            if route != base.route and not many and not parts:
                yield Way(route, base.piece_size)
            for divisor, part in parts.items():
                # Columns that go through together take the memory of as many pieces; no more than the base takes.
                if divisor <= _SMALLER if not many else route == base.route or divisor >= V.shape[1]:
                    yield Way(route, part)

    def _seconds(self, way: Way, piece: Piece, V: Tensor) -> float:
        """Return the time of a product, by example and column; the making of what is kept in a run is left out."""
        size = min(batch_size(piece.batch), _ON_TRIAL)
        step = min(way.piece_size or size, size)
        route, clock = self.routes()[way.route], _clock(V)
        parts = [piece.examples(start, start + step) for start in range(0, size, step)]
        made = [route(part) for part in parts] if self._max_bytes else [route(parts[0])]
        for one in made:
            one.products(V[:, :1])  # warm up
        started = clock()
        for index, part in enumerate(parts):
            (made[index] if self._max_bytes else route(part)).products(V)
        return (clock() - started) / (size * V.shape[1])


def _agree(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= tolerance((other,)) * other.norm())


def _clock(V: Tensor) -> Callable[[], float]:
    """Return a clock: the process's own time where other programs would disturb the measurement, and nothing runs beside it."""
    if V.device.type == "cpu":
        return time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def synchronised() -> float:
        torch.accelerator.synchronize()
        return time.perf_counter()

    return synchronised
