"""Bounds on the ends of a spectrum from its trace and its Frobenius norm alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch

from flatminima._checks import check_at_least, check_positive
from flatminima.estimators.estimate import Estimate

__all__ = ["EigenvalueBracket", "eigenvalue_bracket"]

_ROUNDING = 1e-6


@final
@dataclass(frozen=True)
class EigenvalueBracket:
    """Two intervals, each end with its standard error.

    Attributes:
        largest: Lower and upper bound of λ_max.
        smallest: Lower and upper bound of λ_min.
    """

    largest: tuple[Estimate, Estimate]
    smallest: tuple[Estimate, Estimate]

    def allows(self, *, largest: float | None = None, smallest: float | None = None, num_stderr: float = 4.0) -> bool:
        """Return whether eigenvalues found otherwise lie within the bounds, up to ``num_stderr`` standard errors and rounding.

        Args:
            largest: The largest eigenvalue, such as ``float(eigenpairs(A).values[0])``.
            smallest: The smallest.
            num_stderr: Standard errors to allow beyond each end.
        """
        check_positive("num_stderr", num_stderr, allow_zero=True)
        found = ((largest, self.largest), (smallest, self.smallest))
        size = max(abs(float(end)) for _, ends in found for end in ends)
        return all(_is_within(value, ends, num_stderr, _ROUNDING * size) for value, ends in found if value is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values, ready for JSON."""
        pairs = {"largest": self.largest, "smallest": self.smallest}
        return {name: [end.to_dict() for end in ends] for name, ends in pairs.items()}


def eigenvalue_bracket(trace: Estimate | float, frobenius: Estimate | float, n: int) -> EigenvalueBracket:
    r"""Return the Wolkowicz–Styan bounds on the largest and smallest eigenvalue of a symmetric matrix.

    With the mean :math:`m = \operatorname{Tr} A / n` and variance :math:`s^2 = \|A\|_F^2 / n - m^2` of the eigenvalues,

    .. math:: m + \frac{s}{\sqrt{n-1}} \le \lambda_{\max} \le m + s\sqrt{n-1}, \qquad
              m - s\sqrt{n-1} \le \lambda_{\min} \le m - \frac{s}{\sqrt{n-1}}.

    No product is made: a free check of an eigenvalue where trace and norm are at hand. Standard errors are carried to the
    bounds by the delta method; the two errors are added, since estimates from the same probes depend on each other. Where the
    spectrum is a single value within the errors, s is known no better than the root of the error of s².

    Args:
        trace: Tr A.
        frobenius: ‖A‖_F.
        n: Number of rows.

    Returns:
        Bounds as estimates of shape ``()``, in float64.

    Raises:
        ValueError: If n < 1, a number is not finite, the norm is negative, or the trace is larger than √n ‖A‖_F beyond 6
            standard errors and rounding, as no matrix has it.
        TypeError: If an argument has the wrong type.

    References:
        Wolkowicz & Styan (1980), *Bounds for eigenvalues using traces*, Theorem 2.1.

    Example:
        >>> bracket = eigenvalue_bracket(6.0, 14.0**0.5, n=3)  # of diag(1, 2, 3)
        >>> [round(float(end), 3) for end in bracket.largest]
        [2.577, 3.155]
    """
    check_at_least("n", n, 1)
    t, t_error = _number("trace", trace)
    norm, norm_error = _number("frobenius", frobenius)
    check_positive("frobenius", norm, allow_zero=True)
    unit = norm / math.sqrt(n) or 1.0  # squares of very small or large numbers leave the range
    mean, mean_error, norm_error = t / n / unit, t_error / n / unit, norm_error / math.sqrt(n) / unit
    square = 1.0 if norm else 0.0
    variance, variance_error = square - mean**2, 2 * square * norm_error + 2 * abs(mean) * mean_error
    if variance < -6 * variance_error - _ROUNDING:
        raise ValueError(
            f"`trace` must be at most √n times `frobenius` in magnitude (Cauchy–Schwarz). Got {t:.6g}, {norm:.6g} and n={n}. "
            "Pass the trace and the norm of the same matrix."
        )
    spread = math.sqrt(max(variance, 0.0)) if n > 1 else 0.0
    root = math.sqrt(n - 1)
    near = 1 / root if n > 1 else 0.0
    ends = []
    for c in (near, root, -root, -near):
        error = mean_error + abs(c) * math.sqrt(variance_error)
        if spread > 0:
            error = min(error, abs(1 - c * mean / spread) * mean_error + abs(c) * norm_error / spread)
        ends.append(_bound(unit * (mean + c * spread), unit * error))
    return EigenvalueBracket(largest=(ends[0], ends[1]), smallest=(ends[2], ends[3]))


def _bound(value: float, error: float) -> Estimate:
    numbers = torch.tensor([value, error], dtype=torch.float64)
    return Estimate(numbers[0], numbers[1], method="Wolkowicz-Styan")


def _number(name: str, given: Estimate | float) -> tuple[float, float]:
    if isinstance(given, Estimate):
        if given.value.ndim:
            raise ValueError(f"`{name}` must be one number. Got an estimate of shape {tuple(given.value.shape)}.")
        value, error = float(given.value), float(given.stderr)
        error = 0.0 if math.isnan(error) else error
    elif isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(f"`{name}` must be an Estimate or a number. Got {given!r}.")
    else:
        value, error = float(given), 0.0
    if not math.isfinite(value):
        raise ValueError(f"`{name}` must be finite. Got {value}.")
    return value, error


def _is_within(value: float, ends: tuple[Estimate, Estimate], num_stderr: float, rounding: float) -> bool:
    low, high = ends
    lowest = float(low) - num_stderr * float(low.stderr) - rounding
    return lowest <= value <= float(high) + num_stderr * float(high.stderr) + rounding
