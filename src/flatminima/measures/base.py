"""Measure: a sharpness of the literature as a frozen configuration that one calls on an objective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, final

import torch

from flatminima._checks import check_generator
from flatminima.estimators import Estimate
from flatminima.objective import Objective
from flatminima.symmetries import KINDS

__all__ = ["Measure", "invariant_to"]


def invariant_to(*kinds: str) -> Mapping[str, bool]:
    """Return a declaration: True for these kinds of symmetry, False for every other one."""
    return MappingProxyType({kind: kind in kinds for kind in KINDS})


class Measure(ABC):
    """A number that tells how sharp a point is.

    A subclass is a frozen dataclass of settings; its repr is its label. Calling it on an objective changes nothing there.

    Attributes:
        key: Short name, as in ``flatminima audit --measures``.
        title: Name for people.
        source: Paper and number.
        formula: In plain text.
        meaning: One sentence for someone who has never seen it.
        cost: In gradients over the data, in plain text.
    """

    key: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    formula: ClassVar[str]
    meaning: ClassVar[str]
    cost: ClassVar[str]

    @property
    @abstractmethod
    def invariances(self) -> Mapping[str, bool]:
        """For every kind of symmetry, whether a move along it leaves the value unchanged. Held to by the tests, both ways."""

    @abstractmethod
    def _measure(self, objective: Objective, generator: torch.Generator | None) -> Estimate:
        """Compute the value; the objective is in the form that the measure is defined on."""

    @final
    def __call__(self, objective: Objective, *, generator: torch.Generator | None = None) -> Estimate:
        """Return the value at the objective's current point.

        Args:
            objective: The loss.
            generator: Source of random numbers, where any are used; None is torch's global one.

        Raises:
            NotSupported: If the measure is not defined for this model or loss.
        """
        if not isinstance(objective, Objective):
            raise TypeError(f"`objective` must be a flatminima.Objective. Got {type(objective).__name__}.")
        return self._measure(objective, check_generator(generator))

    @classmethod
    @final
    def declaration(cls) -> dict[str, Any]:
        """Return what the measure says of itself with its default settings, as plain values."""
        return {
            "key": cls.key,
            "title": cls.title,
            "formula": cls.formula,
            "source": cls.source,
            "meaning": cls.meaning,
            "cost": cls.cost,
            "invariances": dict(cls().invariances),
        }
