"""Running mean, variance and skewness of samples that come in blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

__all__ = ["Moments"]

_ZERO = torch.zeros((), dtype=torch.float64)


@final
@dataclass(frozen=True)
class Moments:
    """Running mean, variance and skewness by merging blocks (Chan, Golub & LeVeque 1983; Pébay 2008), about the first sample.

    Measuring from the first sample keeps equal samples exact: their mean is that number and their variance is 0.
    """

    count: int = 0
    origin: Tensor = _ZERO
    shifted_mean: Tensor = _ZERO
    squares: Tensor = _ZERO
    cubes: Tensor = _ZERO

    def with_block(self, block: Tensor) -> Moments:
        """Return the moments of these and further samples ``(b, …)``."""
        block = block.to(torch.float64)
        origin = self.origin if self.count else block[0].clone()
        block = block - origin
        size, mean = block.shape[0], block.mean(0)
        count, total = self.count, self.count + size
        shift, squares = mean - self.shifted_mean, ((block - mean) ** 2).sum(0)
        cubes = ((block - mean) ** 3).sum(0) + shift**3 * (count * size * (count - size) / total**2)
        cubes = cubes + 3 * shift * (count * squares - size * self.squares) / total
        return Moments(
            total,
            origin,
            self.shifted_mean + shift * (size / total),
            self.squares + squares + shift**2 * (count * size / total),
            self.cubes + cubes,
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All but the count."""
        return {"origin": self.origin, "shifted_mean": self.shifted_mean, "squares": self.squares, "cubes": self.cubes}

    @property
    def mean(self) -> Tensor:
        return self.origin + self.shifted_mean

    @property
    def stderr(self) -> Tensor:
        return (self.squares / (max(self.count - 1, 1) * self.count)).sqrt()

    @property
    def skewness(self) -> Tensor:
        return (self.cubes / self.count / (self.squares / self.count) ** 1.5).nan_to_num(0.0, 0.0, 0.0)
