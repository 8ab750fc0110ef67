"""Estimate: a number with its standard error, its cost, and what is needed to trust it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from flatminima._checks import check_positive

__all__ = ["Estimate"]


@dataclass(frozen=True)
class Estimate:
    """A value, how far it may be off, and what it cost.

    Attributes:
        value: The estimate, shape ``()`` or any shape for several numbers at once.
        stderr: Standard error of each entry, same shape; 0 where the value is exact.
        method: How it was obtained, in a few words ("exact", "hutchinson", …).
        num_samples: Independent samples behind ``stderr``; None where no sampling was done.
        num_products: Products with a curvature matrix.
        num_gradients: Further gradients or backward passes over the data.
        num_losses: Further forward passes over the data.
        converged: Whether the requested tolerance was met. A value with ``converged=False`` is still the best one at hand.
        details: Further numbers by name, such as the first- and second-order part of a sharpness.
    """

    value: Tensor
    stderr: Tensor
    method: str = "exact"
    num_samples: int | None = None
    num_products: int = 0
    num_gradients: int = 0
    num_losses: int = 0
    converged: bool = True
    details: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def exact(cls, value: Tensor | float, **fields: Any) -> Estimate:
        """Build an estimate without error."""
        tensor = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64).detach()
        return cls(tensor, torch.zeros_like(tensor), **fields)

    def __float__(self) -> float:
        return float(self.value)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the two-sided confidence interval by Student's t with ``num_samples − 1`` degrees of freedom.

        Raises:
            ValueError: If ``level`` is not between 0 and 1.
        """
        if not 0 < check_positive("level", level) < 1:
            raise ValueError(f"`level` must be between 0 and 1 (a probability). Got {level}.")
        from scipy.stats import t

        degrees = math.inf if self.num_samples is None else self.num_samples - 1
        half = float(t.ppf(0.5 + level / 2, degrees)) * self.stderr if degrees > 0 else torch.full_like(self.stderr, math.inf)
        return self.value - half, self.value + half

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values, ready for JSON."""
        return {
            "value": self.value.tolist(),
            "stderr": self.stderr.tolist(),
            "method": self.method,
            "num_samples": self.num_samples,
            "num_products": self.num_products,
            "num_gradients": self.num_gradients,
            "num_losses": self.num_losses,
            "converged": self.converged,
            "details": {k: v.tolist() if isinstance(v, Tensor) else v for k, v in self.details.items()},
        }

    def __str__(self) -> str:
        if self.value.ndim:
            return f"{tuple(self.value.shape)} values ({self.method})"
        error = "exact" if self.num_samples is None else f"± {float(self.stderr):.2g}"
        return f"{float(self.value):.6g} ({error}; {self.method})"
