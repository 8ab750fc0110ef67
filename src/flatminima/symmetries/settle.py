"""What a walk could only note down: scales that a normalisation undoes, and parameters that are read more than once.

Both are symmetries that no tie between units can express, so the units are bound and a note says what is not moved along.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flatminima.symmetries.units import FIXED, Reuse, UnitTable

__all__ = ["settle"]

#: What every note on a symmetry that is not moved along ends with.
DEPENDS = "no move is made along that, and measures that look at the size of the parameters depend on it"
_MOST_NAMES = 5


def settle(units: UnitTable, normalisations: Sequence[tuple[str, Tensor]], reuses: Sequence[Reuse]) -> tuple[list[str], set[str]]:
    """Bind the units of normalisations and of parameters that are read twice.

    Returns:
        Notes on the rescalings that this leaves out, and the layers and parameters that they concern.
    """
    notes: list[str] = []
    concerned: set[str] = set()
    if normalisations:
        before = _classes(units)
        for name, ids in normalisations:
            feeding = _feeding(units, before, ids)
            if feeding:
                concerned.update(feeding)
                notes.append(
                    f"{name} is unchanged, up to its eps, when all of its input is scaled: a rescaling of what feeds it "
                    f"({shown(feeding)}) is a symmetry; {DEPENDS}"
                )
            units.scale.fix(ids)
    open_reuses = list(reuses)
    while settled := [(r, p) for r in open_reuses if len(p := _unequal(units, r)) <= 1]:
        for reuse, pairs in settled:  # all other terms agree, so these must: the tie says all there is to say
            _tie(units, pairs)
            open_reuses.remove(reuse)
    for reuse in open_reuses:
        pairs = _unequal(units, reuse)
        if len(pairs) > 1:
            concerned.add(reuse.name)
            notes.append(
                f"{reuse.name} is used more than once: rescalings of its uses by different numbers, which other layers make up "
                f"for, are symmetries; {DEPENDS}"
            )
        _tie(units, pairs)
    return list(dict.fromkeys(notes)), concerned


def shown(names: Iterable[str]) -> str:
    """Return a few names, and how many more there are."""
    all_names = list(dict.fromkeys(names))
    more = len(all_names) - _MOST_NAMES
    return ", ".join(all_names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _classes(units: UnitTable) -> Tensor:
    return torch.from_numpy(units.scale.classes(len(units)))


def _feeding(units: UnitTable, classes: Tensor, ids: Tensor) -> list[str]:
    """Return the layers that make these units, or units of the same scale, as far as the scale is free."""
    free = set(classes[ids].reshape(-1).tolist()) - {int(classes[FIXED])}
    return [b.name for b in units.blocks if b.name != "zeros" and free.intersection(classes[b.ids].tolist())]


def _unequal(units: UnitTable, reuse: Reuse) -> list[tuple[Tensor, Tensor]]:
    """Return the terms whose units in the two uses need not have one scale as yet."""
    classes = _classes(units)
    return [(a, b) for a, b in reuse.pairs if not torch.equal(*torch.broadcast_tensors(classes[a], classes[b]))]


def _tie(units: UnitTable, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for old, new in pairs:
        units.scale.tie(old, new)
