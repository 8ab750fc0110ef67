"""Curvature: what every matrix that belongs to an objective has in common."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import nn

from flatminima.objective import Objective
from flatminima.operators.base import LinearOperator
from flatminima.operators.engine import Engine
from flatminima.params import ParameterSpace

__all__ = ["Curvature"]


class Curvature(LinearOperator, ABC):
    """A matrix of an objective at a point, with one block per parameter.

    Attributes:
        objective: The loss.
        theta: The point ``(n,)``, read when the operator was made, so that later training does not move it.
        space: The parameters that rows and columns stand for: the objective's, or those of a diagonal block.
        engine: Makes the products.
    """

    engine: Engine

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.theta = objective.theta
        self.space = objective.space

    @property
    def size(self) -> int:
        return self.space.size

    @property
    def dtype(self) -> torch.dtype:
        return self.objective.dtype

    @property
    def device(self) -> torch.device:
        return self.objective.device

    @property
    def blocks(self) -> Mapping[str, slice]:
        return self.space.slices

    def _names_of(self, pick: object) -> tuple[str, ...]:
        if not isinstance(pick, nn.Module | nn.Parameter) or not self.objective.has_model:
            return super()._names_of(pick)
        return ParameterSpace.of(self.objective.model, pick).names

    def _in(self, names: Sequence[str]) -> Self:
        """Return the same operator on the rows and columns of these parameters."""
        result = type(self).__new__(type(self))
        vars(result).update(vars(self))
        result.space = ParameterSpace({name: self.space.shapes[name] for name in names})
        return result
