"""Rescaling: units multiplied by positive numbers, what reads them divided by the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from flatminima._checks import check_shape
from flatminima.symmetries.move import Layout, Move
from flatminima.symmetries.symmetry import Symmetry

__all__ = ["Rescaling", "RescalingMove", "Role", "Statistic"]


@dataclass(frozen=True)
class Role:
    """How the entries of one tensor follow the log-scales u: their factor is exp(exponent · u[variables]).

    Attributes:
        variables: Number of a log-scale, −1 for none; broadcastable to the tensor's shape.
        exponent: +1 for what produces a unit, −1 for what reads it.
    """

    variables: Tensor
    exponent: int


@dataclass(frozen=True)
class Statistic:
    """A running variance whose channels' inputs are scaled: var ← c² (var + eps) − eps.

    Attributes:
        variables: Number of the log-scale log c of each channel, −1 for none; shape ``(channels,)``.
        eps: Number that the normalisation adds to the variance.
        value: The variances when the symmetry was found, shape ``(channels,)`` in float64.
    """

    variables: Tensor
    eps: float
    value: Tensor


@final
class Rescaling(Symmetry):
    """θ_p → θ_p · exp(Σ_r e_r u[v_r(p)]) for free log-scales u.

    Kinds: "layer" has one log-scale for all units of a layer, "node" one for each unit or channel, "norm-scale" one for each
    channel that a normalisation with running statistics reads (there the statistics move along, exactly, eps included).

    Attributes:
        roles: For each tensor that is multiplied, how its entries follow the log-scales.
        statistics: Running variances by name; empty but for norm-scale.
        labels: Name of each log-scale: a layer, or a layer and the number of a unit in it.
        layers: Number of the layer of each log-scale, increasing in the order of computation, shape ``(dimension,)``.
    """

    def __init__(
        self,
        kind: str,
        layout: Layout,
        roles: Mapping[str, tuple[Role, ...]],
        labels: tuple[str, ...],
        layers: Tensor,
        *,
        buffers: tuple[str, ...] = (),
        statistics: Mapping[str, Statistic] | None = None,
    ) -> None:
        self.kind = kind
        self.layout = layout
        self.roles = roles
        self.statistics = statistics or {}
        self.labels = labels
        self.layers = layers
        self.dimension = len(labels)
        self.buffers = buffers
        self.parameters = tuple(name for name in roles if name not in buffers)
        of = {"layer": "hidden layers", "node": "hidden units", "norm-scale": "channels that are normalised"}[kind]
        self.name = f"rescaling of {self.dimension} {of}"

    def move(self, log_scales: Tensor) -> RescalingMove:
        """Return the move with the given log-scales, shape ``(dimension,)``.

        Raises:
            ValueError: If the shape does not fit or an entry is not finite.
        """
        u = check_shape("log_scales", log_scales, (self.dimension,), "one for each free unit").detach().double().cpu()
        if not bool(torch.isfinite(u).all()):
            raise ValueError("`log_scales` must be finite. Got infinity or NaN.")
        return RescalingMove(self, u)

    def lowest(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return the lowest log-scales that keep every variance nonnegative, shape ``(dimension,)``; −∞ without a limit."""
        lowest = torch.full((self.dimension + 1,), -torch.inf, dtype=torch.float64)
        for name, statistic in self.statistics.items():
            var = state[name].detach().double().cpu() if name in state else statistic.value
            bound = 0.5 * torch.log(statistic.eps / (var + statistic.eps))
            lowest.scatter_reduce_(0, statistic.variables % (self.dimension + 1), bound, "amax")
        return lowest[:-1]

    def _random(self, generator: torch.Generator | None, scale: float, state: Mapping[str, Tensor]) -> RescalingMove:
        u = scale * torch.randn(self.dimension, dtype=torch.float64, generator=generator, device=_device(generator)).cpu()
        return RescalingMove(self, torch.maximum(u, 0.9 * self.lowest(state)) if self.statistics else u)

    def describe(self) -> str:
        last = ", running statistics along with them" if self.statistics else ", what reads them divided by the same"
        return f"{self.kind}: {self.name} by positive numbers{last} (dimension {self.dimension})"


@final
class RescalingMove(Move):
    """The move of a rescaling with log-scales u ``(dimension,)`` in float64."""

    def __init__(self, symmetry: Rescaling, log_scales: Tensor) -> None:
        self.symmetry = symmetry
        self.layout = symmetry.layout
        self.log_scales = log_scales
        self._u = torch.cat([log_scales, log_scales.new_zeros(1)])  # variable −1 picks the zero at the end

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.symmetry.roles) | frozenset(self.symmetry.statistics)

    def inverse(self) -> RescalingMove:
        return RescalingMove(self.symmetry, -self.log_scales)

    def _change(self, name: str, value: Tensor) -> Tensor:
        statistic = self.symmetry.statistics.get(name)
        if statistic is None:
            return value * self._log_factor(name, value.shape).exp().to(value.device)
        squared = (2 * self._u[statistic.variables]).exp().to(value.device)
        # c² var + (c² − 1) eps: no cancellation where c = 1.
        moved = squared * value + (squared - 1) * statistic.eps
        if bool((moved < -1e-9 * statistic.eps).any()):
            raise ValueError(
                f"`log_scales` must keep the variances nonnegative (c² (var + eps) ≥ eps). Got a negative one in {name}. "
                "Move less far, or draw the move with random(state=...)."
            )
        return moved.clamp(min=0)

    def _log_factor(self, name: str, shape: torch.Size) -> Tensor:
        total = torch.zeros([1] * len(shape), dtype=torch.float64)
        for role in self.symmetry.roles.get(name, ()):
            total = total + role.exponent * self._u[role.variables]
        return total


def _device(generator: torch.Generator | None) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device
