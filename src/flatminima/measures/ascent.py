"""The largest rise of a function in a ball, by ascent: a lower bound, from starts that depend on no coordinates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

__all__ = ["Ascent", "maximize_in_ball"]

ValueAndGradient = Callable[[Tensor], tuple[Tensor, Tensor]]


@final
@dataclass(frozen=True)
class Ascent:
    """The best point that was found.

    Attributes:
        value: f there, ``()``; a lower bound of the maximum.
        point: z, ``(n,)``.
        gap: Bound on what a linear model still gains in the ball, relative to the value: 0 at a stationary point.
        converged: Whether the gap fell below the tolerance.
        num_gradients: Values with gradient that it took.
    """

    value: Tensor
    point: Tensor
    gap: float
    converged: bool
    num_gradients: int


def maximize_in_ball(
    function: ValueAndGradient, starts: Sequence[Tensor], radius: float, *, num_steps: int = 20, rtol: float = 1e-6
) -> Ascent:
    r"""Maximise f over ‖z‖₂ ≤ radius, from several starts, and return the best.

    Each step goes to where the linear model of f is largest, z ← radius · ∇f(z)/‖∇f(z)‖, or part of the way there when f would
    fall (Frank–Wolfe with backtracking). For a convex f the full step never falls. There is no step size, and nothing depends
    on the coordinates that z is written in beyond the ball itself, so equivalent problems give equal values.

    Args:
        function: z ``(n,)`` ↦ value ``()`` and gradient ``(n,)``.
        starts: Directions; each is scaled to the sphere. Zero directions are passed over.
        radius: Radius of the ball.
        num_steps: Steps from each start.
        rtol: Relative gap at which to stop. Steps converge linearly, so the value itself can be short of the local maximum by
            many times that.
    """
    best: Ascent | None = None
    count = 0
    for start in starts:
        norm = start.norm()
        if not torch.isfinite(norm) or norm == 0:
            continue
        ascent = _from(function, radius * start / norm, radius, num_steps, rtol)
        count += ascent.num_gradients
        if best is None or ascent.value > best.value:
            best = ascent
    if best is None:
        zero = torch.zeros_like(starts[0])
        return Ascent(zero.sum(), zero, 0.0, True, count)
    return Ascent(best.value, best.point, best.gap, best.converged, count)


def _from(function: ValueAndGradient, z: Tensor, radius: float, num_steps: int, rtol: float) -> Ascent:
    value, gradient = function(z)
    count, gap = 1, float("inf")
    for _ in range(num_steps):
        norm = gradient.norm()
        target = radius * gradient / norm if norm > 0 else z
        gap = float(gradient @ (target - z)) / max(abs(float(value)), torch.finfo(z.dtype).tiny)
        if gap <= rtol:
            return Ascent(value, z, gap, True, count)
        step = 1.0
        while step > 1e-3:
            trial = z + step * (target - z)
            trial_value, trial_gradient = function(trial)
            count += 1
            if trial_value > value:
                break
            step /= 4
        else:
            break
        z, value, gradient = trial, trial_value, trial_gradient
    return Ascent(value, z, gap, gap <= rtol, count)
