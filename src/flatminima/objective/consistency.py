"""Whether the derivative that autograd gives is that of the loss: a directional derivative against finite differences.

Code that stops a gradient on purpose (a norm that is detached, a straight-through estimator, a hook that turns a gradient round)
has a loss and a derivative that do not belong together: curvature is then that of another function, and nothing raises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from flatminima._errors import FlatminimaError
from flatminima.objective.objective import Objective

__all__ = ["DerivativeCheck", "Slope", "check_derivative", "in_double"]

_STEPS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)  # of the parameters' size: the smallest crosses few kinks, the largest rounds least
_NEARBY = 1e-2  # of the parameters' size


@final
@dataclass(frozen=True)
class Slope:
    """The slope of the loss along one direction at one point, from two sources.

    Attributes:
        derivative: g·v, by autograd.
        differences: [L(θ + hv) − L(θ − hv)] / 2h, one for every step that was tried.
        steps: The steps h, from the largest on, until one agreed.
        agrees: Whether the last difference is the derivative, within 1e-4 of it (1e-2 outside float64) and rounding.
    """

    derivative: float
    differences: tuple[float, ...]
    steps: tuple[float, ...]
    agrees: bool


@final
@dataclass(frozen=True)
class DerivativeCheck:
    """What ``check_derivative`` compared.

    Attributes:
        here: At the objective's point. At a kink of the loss, or where the gradient vanishes, this alone says nothing.
        nearby: At a random point close by, a hundredth of the parameters' size away.
        dtype: What it was computed in.
    """

    here: Slope
    nearby: Slope
    dtype: torch.dtype

    @property
    def agrees(self) -> bool:
        """Whether autograd's derivative is that of the loss: at the point close by, where kinks are met with probability 0."""
        return self.nearby.agrees

    def __bool__(self) -> bool:
        return self.agrees

    def __str__(self) -> str:
        if self.agrees:
            kink = "" if self.here.agrees else " (at the point itself it is not: a kink of the loss)"
            return f"The derivative is that of the loss: {_in_words(self.nearby)}{kink}."
        return (
            f"The derivative is not that of the loss: {_in_words(self.nearby)} near the point. Known causes: .detach() or "
            "torch.no_grad() on a part of the loss, a straight-through estimator, a hook or autograd.Function that changes "
            "gradients, outputs that are rounded, an embedding's padding_idx (that "
            "row is held fixed). Curvature is that of the function which autograd sees, not of the loss."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers, ready for JSON."""
        return {
            "agrees": self.agrees,
            "dtype": str(self.dtype).removeprefix("torch."),
            **{
                name: {"derivative": slope.derivative, "differences": list(slope.differences), "steps": list(slope.steps)}
                for name, slope in (("here", self.here), ("nearby", self.nearby))
            },
        }


def check_derivative(objective: Objective, *, generator: torch.Generator | None = None) -> DerivativeCheck:
    r"""Compare autograd's directional derivative with central differences of the loss along one random direction.

    .. math:: g^\top v \overset?= \frac{L(\theta + hv) - L(\theta - hv)}{2h}, \qquad v_i \sim \mathcal N(0, 1).

    At θ and at a random point close by, in float64 where the model can. Steps are fractions of the parameters' root mean square,
    tried from the largest on until one agrees: large ones cross kinks (of a ReLU), small ones drown in rounding, and the
    derivative of another function agrees with none. A part that is cut off and makes up less than 1e-4 of the slope is not seen.

    Cost: two gradients and, where all is well, five forward passes over the data; at most twenty-five.

    Args:
        objective: The loss.
        generator: Source of the direction and of the point close by.

    Returns:
        DerivativeCheck, true if the derivative is that of the loss; ``str`` says it in words.

    Example:
        >>> w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
        >>> bool(check_derivative(Objective.from_closure(lambda: (w**4).sum(), [w])))
        True
        >>> bool(check_derivative(Objective.from_closure(lambda: (w**2 * (w**2).detach()).sum(), [w])))
        False
    """
    objective = in_double(objective)
    theta = objective.theta
    size = float(theta.square().mean().sqrt()) or 1.0
    noise = torch.randn(2, theta.numel(), generator=generator, dtype=torch.float64, device=_device(generator, theta))
    direction, offset = noise.to(theta.device, theta.dtype)
    here = _slope(objective, theta, direction, size)
    nearby = _slope(objective, theta + _NEARBY * size * offset, direction, size)
    return DerivativeCheck(here, nearby, objective.dtype)


def _slope(objective: Objective, theta: Tensor, direction: Tensor, size: float) -> Slope:
    value, gradient = objective.value_and_gradient(theta)
    derivative, norm = float(gradient @ direction), float(gradient.norm())
    epsilon = torch.finfo(objective.dtype).eps
    tolerance = 1e-4 if objective.dtype == torch.float64 else 1e-2
    differences: list[float] = []
    steps: list[float] = []
    agrees = False
    for step in _STEPS:
        h = step * size
        rounding = 8 * epsilon * max(abs(float(value)), norm * float(theta.norm())) / h
        if steps and rounding > 0.01 * max(abs(derivative), norm):
            break  # anything would agree
        above, below = (objective.value(theta + sign * h * direction).double() for sign in (1, -1))
        steps.append(h)
        differences.append(float(above - below) / (2 * h))
        # v is random, so |g·v| is about ‖g‖; much smaller is chance
        scale = max(abs(derivative), abs(differences[-1]), 0.1 * norm)
        agrees = abs(differences[-1] - derivative) <= tolerance * scale + rounding
        if agrees:
            break
    return Slope(derivative, tuple(differences), tuple(steps), agrees)


def in_double(objective: Objective) -> Objective:
    """Return the objective in float64 if its model can compute in that."""
    try:
        double = objective.to(torch.float64)
        finite = math.isfinite(float(double.value()))
    except (FlatminimaError, RuntimeError, TypeError, ValueError, IndexError):  # a closure, or code that fixes a type
        return objective
    return double if finite else objective


def _device(generator: torch.Generator | None, theta: Tensor) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device


def _in_words(slope: Slope) -> str:
    differences = ", ".join(f"{difference:.6g}" for difference in slope.differences)
    steps = ", ".join(f"{step:.1g}" for step in slope.steps)
    return f"{slope.derivative:.6g} by autograd, {differences} by differences with steps {steps}"
