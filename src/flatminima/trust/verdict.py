"""When a number counts as moved, and when a point as a minimum."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flatminima.trust.result import DEFECT, FAILED, MINIMUM, MOVES, SADDLE, SLOPE, SURVIVES, UNKNOWN, Attack, Reading

__all__ = ["LARGEST_SHARE_LEFT", "attack", "fold", "gained_by_training", "minimum_verdict", "overall", "share_left"]

#: Standard errors that two estimates of one number may be apart: 4 leaves 1 in 16,000 comparisons to chance.
_SIGMAS = 4.0

#: Share of what training can gain that may still be to come at a minimum.
LARGEST_SHARE_LEFT = 0.01


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


def gained_by_training(loss: float, reference: float | None) -> float:
    """Return how far the loss lies below its reference; where there is none, its size stands in."""
    return abs(loss) if reference is None else max(reference - loss, 0.0)


def share_left(fall: float, gained: float) -> float:
    """Return which share of all that training can gain is still to come: fall / (gained + fall), and 0 where nothing is."""
    if fall <= 0:
        return 0.0
    return fall / (gained + fall) if math.isfinite(fall) else 1.0


def minimum_verdict(fall: float, saddle_fall: float, gained: float, *, is_known: bool = True) -> str:
    """Return whether a point is a minimum: "minimum", "saddle", "slope", or "unknown".

    Args:
        fall: How far the slope is expected to lower the loss still.
        saddle_fall: How far the loss falls below its tangent somewhere.
        gained: How far training has brought the loss down.
        is_known: Whether ``fall`` is all that the slope can do; if not, a small one proves nothing.
    """
    if share_left(fall, gained + saddle_fall) > LARGEST_SHARE_LEFT:  # beside a long way down, a short slope is none
        return SLOPE
    if not is_known:
        return UNKNOWN
    return SADDLE if share_left(saddle_fall, gained) > LARGEST_SHARE_LEFT else MINIMUM


def _same(base: Reading, reading: Reading, rtol: float, *, is_paired: bool) -> bool:
    assert base.value is not None
    assert reading.value is not None
    noise = 0.0 if is_paired else _SIGMAS * math.hypot(base.stderr, reading.stderr)
    allowed = rtol * max(abs(base.value), abs(reading.value)) + noise
    return abs(reading.value - base.value) <= allowed
