"""Stochastic Lanczos quadrature: how many probes, of how many steps, and which eigenvalues are not sampled at all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from flatminima.estimators.deflation import Known, choose_count, find_known
from flatminima.estimators.gauss_quadrature import NOISE, JacobiMatrix, without_noise
from flatminima.estimators.probe_lanczos import MIN_STEPS, ProbeGroup, group_width
from flatminima.estimators.quadrature import Quadrature
from flatminima.estimators.sampling import Plan, check_finite, draw_probes
from flatminima.estimators.slq_budget import DENSE_ROWS, Budget
from flatminima.estimators.stopping import samples_to_stop, share_of_tolerance
from flatminima.operators.base import LinearOperator

__all__ = ["Aim", "sample_spectrum"]

_MOST_STEPS = 100
_FIRST_LOOK = 8
_PILOTS = 2
_COLUMNS_AT_ONCE = 16
_UNBOUNDED = 2**31
_KEPT = ("spent", "scale", "is_open", "look", "gave_way")


@final
@dataclass(frozen=True)
class Aim:
    """What the sampling is for.

    Attributes:
        columns: From nodes ``(m,)`` to the numbers that are averaged over the spectrum, ``(m, c)``.
        is_settled: From the quadrature by the probes of one group, as far as they are, which of them need no further step.
        of_magnitude: Whether errors are relative to the mean of the |numbers| rather than to |their mean|.
        closed: Whether the rules are closed ones.
    """

    columns: Callable[[Tensor], Tensor]
    is_settled: Callable[[Quadrature], list[bool]]
    of_magnitude: bool
    closed: bool = False

    def scale(self, G: Tensor, weights: Tensor) -> Tensor:
        """Return what errors are relative to, ``(c,)``, for columns ``(m, c)`` with weights ``(m,)``."""
        return (weights[:, None] * G.abs()).sum(0) if self.of_magnitude else (weights[:, None] * G).sum(0).abs()


def _all_eigenvalues(A: LinearOperator, plan: Plan, spent: int = 0) -> Quadrature:
    """Return all eigenvalues, from n products."""
    M = torch.empty(A.size, A.size, dtype=torch.float64)
    state = plan.checkpoint.load("columns")
    begin = 0 if state is None else int(state.numbers["end"])
    if state is not None:
        M[:, :begin] = state.tensors["columns"].to(M)
    for start in range(begin, A.size, _COLUMNS_AT_ONCE):
        end = min(start + _COLUMNS_AT_ONCE, A.size)
        E = torch.zeros(A.size, end - start, dtype=A.dtype, device=A.device)
        E[start:end].fill_diagonal_(1)
        M[:, start:end] = check_finite(A @ E).to(M)
        plan.checkpoint.keep("columns", {"columns": M[:, :end]}, {"end": end})
        plan.progress(spent + end, spent + A.size, "spectrum")
    values = torch.linalg.eigvalsh((M + M.T) / 2)
    known = replace(Known.nothing(A), values=values)
    return Quadrature(A.size, known, (), _floor(A, float(values.abs().max())), spent + A.size, True)


def sample_spectrum(A: LinearOperator, aim: Aim, budget: Budget, plan: Plan) -> Quadrature:
    """Return the quadrature that fulfils the budget; all eigenvalues where that is the cheaper way."""
    if not A.size:
        raise ValueError("`A` must have at least one row. Got shape (0, 0).")
    if budget.is_dense(A, plan):
        return _all_eigenvalues(A, plan)
    return _Sampler(A, aim, budget, plan).run()


@final
class _Sampler:
    """The sequential loop: groups of probes, until the error is small enough or a limit is met.

    Everything it decides by is in what :meth:`_keep` keeps, so that an interrupted run goes on as if nothing had been.
    """

    def __init__(self, A: LinearOperator, aim: Aim, budget: Budget, plan: Plan) -> None:
        self.A, self.aim, self.budget, self.plan = A, aim, budget, plan
        self.known = budget.known
        self.jacobis: list[JacobiMatrix] = []
        self.spent, self.scale = 0, 0.0
        self.is_fixed = budget.num_probes is not None
        self.is_open = budget.deflate is None and not self.is_fixed and not self.known.count  # whether to deflate
        self.look = budget.num_probes or (_PILOTS if self.is_open else _FIRST_LOOK)
        self.gave_way = False  # to all eigenvalues
        self.group: ProbeGroup | None = None

    def run(self) -> Quadrature:
        if not self._restore() and self.budget.deflate:
            self._deflate(min(self.budget.deflate, self.A.size))
        if self.gave_way:
            return self._give_way()
        if self.known.count == self.A.size:
            return self._result(True)
        while True:
            while self.group is not None or (len(self.jacobis) < self.look and not self._is_over()):
                self._sample(min(self.look - len(self.jacobis), group_width(self.A)))
            if self.is_fixed:
                return self._result(len(self.jacobis) >= self.look)
            if self.is_open and self._is_over():
                return self._result(False)
            converged, forecast = self._open_look() if self.is_open else self._look()
            if converged or self._is_over():
                return self._result(converged)
            if self._is_dense_cheaper(forecast):
                return self._give_way()

    def _give_way(self) -> Quadrature:
        self.gave_way = True
        self._keep()
        return _all_eigenvalues(self.A, self.plan, self.spent)

    def _open_look(self) -> tuple[bool, float]:
        """Decide by the pilots how many eigenvalues to take out, and return the products that the rest seems to take."""
        floor, rtol, steps = self._floor(), self.plan.rtol, self._steps()
        rules = [replace(rule, nodes=without_noise(rule.nodes, floor)) for rule in self._result(False).rules]
        k, forecast = choose_count(self.A, rules, self.aim.columns, self.aim.scale, rtol, steps, _FIRST_LOOK)
        if k and not self._is_dense_cheaper(forecast):
            self._deflate(k)
        self.is_open, self.look = False, _FIRST_LOOK
        self._keep()
        return False, forecast

    def _look(self) -> tuple[bool, float]:
        """Return whether the error is small enough, and the products that the rest seems to take."""
        result, p = self._result(False), len(self.jacobis)
        spread = result.samples(self.aim.columns).std(0)
        relative = (spread / self.aim.scale(*self._columns(result))).nan_to_num(0.0, posinf=math.inf)
        needed = samples_to_stop((float(relative.max()) / self.plan.rtol) ** 2, p + 1)
        self.look = math.ceil(min(needed, 2 * p))
        shares = [share_of_tolerance(p, kurtosis) for kurtosis in self._kurtosis(result)]
        is_met = all(error / p**0.5 <= self.plan.rtol * share for error, share in zip(relative.tolist(), shares, strict=True))
        return is_met, (needed - p) * self._steps()

    def _kurtosis(self, result: Quadrature) -> list[float]:
        """Return the excess kurtosis of a probe's vᵀ g(A) v for each column g, by the rules so far.

        Probes have length 1, so that a constant in g adds no variance: 12 Tr B⁴ / (Tr B²)² with B = g(A) − mean.
        """
        G = self.aim.columns(without_noise(torch.cat([rule.nodes for rule in result.rules]), result.noise_floor))
        weights = torch.cat([rule.weights for rule in result.rules]) / len(result.rules)
        squares = (G - weights @ G).square()
        second, fourth = weights @ squares, weights @ squares.square()
        kurtosis: list[float] = (12 * fourth / (result.share * result.size * second.square())).nan_to_num(0.0).tolist()
        return kurtosis

    def _columns(self, result: Quadrature) -> tuple[Tensor, Tensor]:
        """Return the numbers that are averaged at all nodes, ``(m, c)``, and the nodes' weights ``(m,)``."""
        rules = result.rules
        nodes = torch.cat([self.known.values, *(rule.nodes for rule in rules)])
        fixed = torch.full_like(self.known.values, 1 / self.A.size)
        weights = torch.cat([fixed, *(rule.weights * (result.share / len(rules)) for rule in rules)])
        return self.aim.columns(without_noise(nodes, result.noise_floor)), weights

    def _deflate(self, k: int) -> None:
        """Find the k largest eigenvalues, at half of what is left to spend at most."""
        room = _UNBOUNDED if self.is_fixed else (self._room() - 2 * MIN_STEPS) // 2
        if room >= 2 * k:
            self.known, cost = find_known(self.A, k, self.plan, min(room, 40 + 20 * k))
            self.spent += cost
            if self.known.count:
                self.jacobis = []  # the pilots have been of the whole space
        self._keep()

    def _is_dense_cheaper(self, forecast: float) -> bool:
        n = self.A.size
        fits = n <= min(DENSE_ROWS, self._room()) and self.plan.deadline == math.inf
        return self.budget.method == "auto" and fits and forecast > n

    def _is_over(self) -> bool:
        """Whether a limit forbids a further group; two probes are always made, since a standard error takes two."""
        is_late = time.monotonic() > self.plan.deadline
        return len(self.jacobis) >= 2 and (is_late or self._room() < MIN_STEPS)

    def _room(self) -> int:
        return _UNBOUNDED if self.is_fixed else self.plan.max_products - self.spent

    def _steps(self) -> float:
        return sum(jacobi.num_steps for jacobi in self.jacobis) / max(len(self.jacobis), 1)

    def _sample(self, width: int) -> None:
        """Run a group of probes, or the rest of one that was interrupted."""
        if self.group is None:
            width = max(1, min(width, self._room() // max(MIN_STEPS, round(self._steps()))))
            steps = self.budget.num_steps or min(_MOST_STEPS, max(MIN_STEPS, self._room() // width))
            self.group = ProbeGroup(self.A, width, self.known.rows, steps)
            self.group.start(self._draw(width))
        group, before = self.group, self._floor()

        def is_settled(jacobis: Sequence[JacobiMatrix]) -> list[bool]:
            floor = max(before, _floor(self.A, group.scale))
            return self.aim.is_settled(Quadrature(self.A.size, self.known, tuple(jacobis), floor, 0, False, self.aim.closed))

        group.run(None if self.budget.num_steps else is_settled, self.plan.deadline, self._after_step)
        self.jacobis += group.jacobis
        self.spent += group.num_products
        self.scale = max(self.scale, group.scale)
        self.group = None
        self._keep()

    def _draw(self, width: int) -> Tensor:
        # Rademacher probes lose some of their length to the known vectors, which biases their normalised forms by k/n²
        plan = self.plan if self.A.size >= 64 * self.known.count else replace(self.plan, probes="gaussian")
        return draw_probes(self.A, width, plan)

    def _after_step(self, group: ProbeGroup) -> None:
        self._keep()
        self.plan.progress(self.spent + group.num_products, None, "spectrum")

    def _keep(self) -> None:
        if not self.budget.is_kept:
            return
        tensors = {"known values": self.known.values, "known rows": self.known.rows}
        numbers: dict[str, Any] = {name: getattr(self, name) for name in _KEPT}
        numbers |= {"residual": self.known.residual, "group": None}
        numbers["jacobis"] = [[j.alphas, j.betas, j.is_exact] for j in self.jacobis]
        if self.group is not None:
            rows, numbers["group"] = self.group.state()
            tensors |= rows
        self.plan.checkpoint.keep("probes", tensors, numbers)

    def _restore(self) -> bool:
        """Take up the state that an interrupted call left, if there is one."""
        state = self.plan.checkpoint.load("probes")
        if state is None:
            return False
        tensors, numbers = state.tensors, state.numbers
        for name in _KEPT:
            setattr(self, name, numbers[name])
        self.known = Known(tensors["known values"].cpu(), tensors["known rows"], numbers["residual"])
        self.jacobis = [JacobiMatrix(*parts) for parts in numbers["jacobis"]]
        group = numbers["group"]
        if group is not None:
            self.group = ProbeGroup(self.A, len(group["jacobis"]), self.known.rows, group["max_steps"])
            self.group.restore(tensors, group)
        return True

    def _floor(self) -> float:
        nodes = [self.known.values, *(jacobi.rule().nodes for jacobi in self.jacobis)]
        return _floor(self.A, max(self.scale, float(torch.cat(nodes).abs().max()) if sum(map(len, nodes)) else 0.0))

    def _result(self, converged: bool) -> Quadrature:
        return Quadrature(self.A.size, self.known, tuple(self.jacobis), self._floor(), self.spent, converged, self.aim.closed)


def _floor(A: LinearOperator, largest: float) -> float:
    return NOISE * torch.finfo(A.dtype).eps * largest
