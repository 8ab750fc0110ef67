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

_TINY = 1e-6


@dataclass(frozen=True)
class Estimate:
    """A value, how far it may be off, and what it cost.

    Attributes:
        value: The estimate, shape ``()`` or any shape for several numbers at once.
        stderr: Standard error of each entry, same shape; 0 where the value is exact.
        method: How it was obtained, in a few words ("exact", "hutchinson", …).
        num_samples: Independent samples behind ``stderr``; None where no sampling was done.
        skewness: Skewness of a single sample, same shape; None where it is not known. Intervals are corrected for it.
        power: The value is the samples' mean to this power (½ for a norm).
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
    skewness: Tensor | None = None
    power: float = 1.0
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
        r"""Return the two-sided confidence interval.

        Student's t with ``num_samples − 1`` degrees of freedom; where the samples' skewness γ is known, each end is the outer one
        of that and of Hall's (1992) transform, since the t statistic of skewed samples is skewed itself: with
        :math:`a = \gamma / (3\sqrt m)` and :math:`b = a/2`,

        .. math:: \bar x - s_{\bar x}\, \big(\sqrt[3]{1 + 3a(q - b)} - 1\big)/a \qquad\text{at the quantiles } q = \pm t.

        Quadratic forms whose matrix has one large eigenvalue are as skewed as χ² with one degree of freedom: of 95 % intervals t
        covers 86 % with 10 samples and 91 % with 30 there, the transform alone 92 % where two large eigenvalues have opposite
        signs, and the outer ends 93 to 97 % of both with 10 samples or more, 90 % with 5 (benchmarks/interval_coverage.py).

        Raises:
            ValueError: If ``level`` is not between 0 and 1.

        References:
            Hall (1992), *On the removal of skewness by transformation*, J. R. Statist. Soc. B 54.
        """
        if not 0 < check_positive("level", level) < 1:
            raise ValueError(f"`level` must be between 0 and 1 (a probability). Got {level}.")
        from scipy.stats import t

        if self.num_samples is None:
            return self.value, self.value
        if self.num_samples < 2:
            infinite = torch.full_like(self.stderr, math.inf)
            return -infinite, infinite
        quantile = float(t.ppf(0.5 + level / 2, self.num_samples - 1))
        upper, lower = self._hall(quantile).clamp_min(quantile), self._hall(-quantile).clamp_max(-quantile)
        if self.power == 1:
            return self.value - self.stderr * upper, self.value - self.stderr * lower
        # Relative to the value, so that no power leaves its range; the mean has the relative error stderr / (power value).
        error = (self.stderr / (self.power * self.value)).nan_to_num(0.0)
        low, high = ((1 - error * q).clamp_min(0) ** self.power for q in (upper, lower))
        return self.value * low, self.value * high

    def _hall(self, q: float) -> Tensor:
        """Return the t statistic's quantile by Hall's transform, given Student's."""
        if self.skewness is None or self.num_samples is None:
            return torch.full_like(self.value, q)
        a = self.skewness.to(self.value) / (3 * self.num_samples**0.5)
        cubed = 1 + 3 * a * (q - a / 2)
        root = cubed.sign() * cubed.abs() ** (1 / 3)
        return torch.where(a.abs() < _TINY, q, (root - 1) / torch.where(a == 0, 1.0, a))

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
