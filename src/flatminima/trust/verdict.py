"""When a number counts as moved, and when a point as a minimum."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flatminima.trust.result import DEFECT, FAILED, MINIMUM, MOVES, SADDLE, SLOPE, SURVIVES, Attack, Reading

__all__ = ["attack", "expected_fall", "fold", "minimum_verdict", "overall"]

#: Standard errors that two estimates of one number may be apart: 4 leaves 1 in 16,000 comparisons to chance.
_SIGMAS = 4.0

#: Share of the loss that one step may still gain at a stationary point.
_LARGEST_FALL = 0.01


def fold(old: float, new: float) -> float | None:
    """Return the larger of new/old and old/new, at least 1; None where the sign changed or one of them is zero."""
    if old == new:
        return 1.0
    if old * new <= 0 or not math.isfinite(old) or not math.isfinite(new):
        return None
    return max(new / old, old / new)


def attack(kind: str, declared: bool, base: Reading, readings: Sequence[Reading], *, rtol: float) -> Attack:
    """Compare the readings after moves along one kind of symmetry with the one before.

    Args:
        kind: Kind of symmetry.
        declared: Whether the measure claims to be invariant.
        base: The reading at the network as it is.
        readings: Those after the moves.
        rtol: Relative change that counts as rounding. Readings share their probes, so nothing else is allowed; but a permutation
            deals the probes out anew, and there four standard errors of the difference are.
    """
    folds = tuple(
        fold(base.value, reading.value) if base.value is not None and reading.value is not None else None for reading in readings
    )
    if base.value is None or any(reading.value is None for reading in readings):
        verdict = FAILED
    elif all(_same(base, reading, rtol, is_paired=kind != "permutation") for reading in readings):
        verdict = SURVIVES
    else:
        verdict = DEFECT if declared else MOVES
    return Attack(kind, declared, tuple(readings), folds, verdict)


def overall(base: Reading, attacks: Sequence[Attack]) -> str:
    """Return the verdict on a measure: the worst of its attacks."""
    if base.value is None:
        return FAILED
    verdicts = {a.verdict for a in attacks}
    return next((v for v in (DEFECT, FAILED, MOVES) if v in verdicts), SURVIVES)


def minimum_verdict(loss: float, gradient_norm: float, smallest: float, largest: float, noise: float) -> str:
    """Return whether a point is a minimum: "minimum", "saddle" or "slope".

    It is a slope where a step of 1/λ_max along the gradient would lower the loss by more than a hundredth of itself, and a saddle
    where it is none but the Hessian has an eigenvalue below ``−noise``.
    """
    if expected_fall(gradient_norm, largest) > _LARGEST_FALL * abs(loss):
        return SLOPE
    return SADDLE if smallest < -noise else MINIMUM


def expected_fall(gradient_norm: float, largest: float) -> float:
    """Return how far a step of 1/λ_max along the gradient lowers the loss at least, to second order: ‖∇L‖²/(2λ_max)."""
    if gradient_norm == 0:
        return 0.0
    return gradient_norm**2 / (2 * largest) if largest > 0 else math.inf


def _same(base: Reading, reading: Reading, rtol: float, *, is_paired: bool) -> bool:
    assert base.value is not None
    assert reading.value is not None
    noise = 0.0 if is_paired else _SIGMAS * math.hypot(base.stderr, reading.stderr)
    allowed = rtol * max(abs(base.value), abs(reading.value)) + noise
    return abs(reading.value - base.value) <= allowed
