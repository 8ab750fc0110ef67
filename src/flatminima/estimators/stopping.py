r"""When to stop sampling: errors relative to the value, and how much of the tolerance a look at few samples may use.

The sample variance of few samples is a poor guide to the true one. A look before ``MIN_SAMPLES`` therefore asks that the error
would meet the tolerance even if the variance were at the upper end of its 95 % confidence interval; from there on the estimate
is taken as it is.

How far the sample variance scatters depends on the kurtosis of a sample, of which few samples tell little: where one eigenvalue
dominates, samples that happen to lie close together look harmless. For quadratic forms vᵀAv the images Av tell it whatever the
samples are. With independent v and w

.. math:: \frac{\mathbb E (Av \cdot Aw)^2}{\mathbb E \|Av\|^2\, \mathbb E \|Aw\|^2} =
    \frac{\operatorname{Tr} A^4}{(\operatorname{Tr} A^2)^2} = \frac{\kappa}{12},

κ the excess kurtosis of vᵀAv for Gaussian v: the images of all probes are parallel where there is but one eigenvalue.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

__all__ = [
    "FIRST_LOOK",
    "MIN_SAMPLES",
    "Images",
    "largest_relative_error",
    "relative_error_of_norm",
    "samples_to_stop",
    "share_of_tolerance",
]

#: Samples from which on the standard error is taken as it is.
MIN_SAMPLES = 64
#: First look at the error of quadratic forms.
FIRST_LOOK = 12
#: Standard normal quantile at 5 %.
_QUANTILE = -1.6449
_LEAST_SHARE = 0.05
_SKETCH = 256


def share_of_tolerance(count: int, kurtosis: float = 0.0) -> float:
    r"""Return the share of the tolerance that a standard error from ``count`` samples may take up to end the sampling.

    √(χ²_{0.05}(ν)/ν), by Wilson & Hilferty's (1931) cube, with ν = (count − 1) / (1 + κ/2) degrees of freedom.

    Args:
        count: Number of samples, at least 2.
        kurtosis: Excess kurtosis κ of a sample.
    """
    if count >= MIN_SAMPLES:
        return 1.0
    freedom = max((count - 1) / (1 + kurtosis / 2), 1.0)
    cube = 1 - 2 / (9 * freedom) + _QUANTILE * math.sqrt(2 / (9 * freedom))
    return math.sqrt(max(cube, _LEAST_SHARE) ** 3)


@final
class Images:
    """Sketches of the images of up to ``MIN_SAMPLES`` probes, from which the kurtosis of their quadratic forms follows.

    A sketch is 256 signed sums of an image's entries; inner products of sketches are those of the images, give or take 1/16 of
    the lengths.
    """

    def __init__(self) -> None:
        self.sketches = torch.zeros(_SKETCH, 0, dtype=torch.float64)
        self._signs: Tensor | None = None

    def add(self, images: Tensor) -> None:
        """Add images ``(n, b)``."""
        images = images[:, : MIN_SAMPLES - self.sketches.shape[1]]
        if not images.shape[1]:
            return
        if self._signs is None:
            generator = torch.Generator().manual_seed(0)
            signs = torch.empty(images.shape[0], 1).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
            self._signs = signs.to(images)
        signed = images * self._signs
        whole = len(signed) // _SKETCH * _SKETCH
        sketch = signed[:whole].reshape(-1, _SKETCH, signed.shape[1]).sum(0, dtype=torch.float64)
        sketch[: len(signed) - whole] += signed[whole:]
        self.sketches = torch.cat([self.sketches, sketch.cpu()], dim=1)

    def kurtosis(self) -> float | None:
        """Return κ, or None for less than two images."""
        if self.sketches.shape[1] < 2:
            return None
        gram = self.sketches.T @ self.sketches
        sizes = gram.diagonal().clone()
        products = (sizes.sum() ** 2 - sizes.square().sum()).clamp_min(0)
        squares = gram.square().sum() - sizes.square().sum()
        return 12 * max(float((squares / products).nan_to_num(0.0)) - 1 / _SKETCH, 0.0)


def samples_to_stop(needed: float, first_look: int) -> float:
    """Return after how many samples the sampling will stop.

    Args:
        needed: Number of samples with which the true standard error is the tolerance.
        first_look: Samples before the first look.
    """
    if needed >= MIN_SAMPLES:
        return needed
    for count in range(first_look, MIN_SAMPLES):
        if needed <= count * share_of_tolerance(count) ** 2:
            return count
    return max(MIN_SAMPLES, first_look)


def largest_relative_error(mean: Tensor, stderr: Tensor, dtype: torch.dtype) -> float:
    """Return the largest stderr / |mean| over the entries; errors that are ``dtype``'s rounding of the largest count as 0."""
    floor = 8 * torch.finfo(dtype).eps * mean.abs().max()
    return float(torch.where(stderr <= floor, torch.zeros_like(stderr), stderr / mean.abs()).max())


def relative_error_of_norm(mean: Tensor, stderr: Tensor) -> float:
    """Return ‖stderr‖ / ‖mean‖, and 0 where both are 0."""
    error, size = float(torch.linalg.vector_norm(stderr)), float(torch.linalg.vector_norm(mean))
    return error / size if size else (math.inf if error else 0.0)
