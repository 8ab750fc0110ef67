"""What measures and moves are called in plots, pages and the terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from flatminima.plots.numbers import fold
from flatminima.trust import Attack, Reading, Row

__all__ = ["fold_label", "kinds", "titles"]


def titles(rows: Sequence[Row]) -> dict[int, str]:
    """Return the title of each row by its place; two rows of one title get their settings instead."""
    counts = Counter(row.title for row in rows)
    return {place: row.title if row.title and counts[row.title] == 1 else row.name for place, row in enumerate(rows)}


def kinds(rows: Sequence[Row]) -> list[str]:
    """Return the kinds of symmetry along which the rows were moved, in order."""
    return list(dict.fromkeys(attack.symmetry for row in rows for attack in row.attacks))


def fold_label(base: Reading, attack: Attack) -> str:
    """Return the largest fold change as text, or why there is none."""
    values = [base.value, *(reading.value for reading in attack.readings)]
    if attack.fold is not None:
        return fold(attack.fold)
    if any(value is None or math.isnan(value) for value in values):
        return "no value"
    if any(value == 0 for value in values):
        return "to or from 0"
    return "changes sign" if min(v for v in values if v is not None) < 0 else fold(math.inf)
