"""Larger groups than rescalings, which are named and not moved along: layers without a nonlinearity between them.

- Layers that read each other without a nonlinearity between: any invertible matrix fits between them.
- Layers that read the same and are added: only the sum of their weights counts.
- Biases that are added, or that a layer with a bias reads without a nonlinearity between: one makes up for a shift of the other.
- A normalisation that subtracts the mean: it does not see one number that is added to all its inputs.

The walk over the graph proposes them, and each is tried numerically before it is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from torch import nn

from flatminima.symmetries.graph import Graph, one_line
from flatminima.symmetries.inputs import Call, num_operations
from flatminima.symmetries.linear_trials import Trials
from flatminima.symmetries.linear_walk import Part, Proposals, propose
from flatminima.symmetries.settle import DEPENDS, shown

__all__ = ["linear_groups"]

_MOST_WORK = 100_000_000_000
_MOST_SHIFTS = 1000
#: Forward passes of a trial.
_RUNS = 8


def linear_groups(graph: Graph, model: nn.Module, call: Call) -> list[str]:
    """Return notes on the groups between layers without a nonlinearity between them.

    Args:
        graph: The traced model.
        model: The network in float64, at a point where no bias is zero.
        call: Example inputs.
    """
    proposals = propose(graph)
    chains, shifts = list(_chains(proposals)), _free(proposals.constraints)
    pairs = list(dict.fromkeys(proposals.same_input))
    centred = {op: list(dict.fromkeys(layers)) for op, layers in proposals.centred.items()}
    num_trials = len(chains) + len(pairs) + sum(map(len, centred.values()))
    if not num_trials and not shifts:
        return []
    work = num_operations(model, call)
    if _RUNS * num_trials * work > _MOST_WORK:
        return [
            f"matrices and shifts between layers without a nonlinearity between them, of which the graph may allow {num_trials}, "
            "were not tried numerically: the network is too large for it"
        ]
    trials, notes = Trials(model, call), list[str]()
    try:
        notes += [_chain_note(parts, readers, proposals.out_axes) for parts, readers in chains if trials.can_mix(parts, readers)]
        notes += [_sum_note(a, b) for a, b in pairs if trials.can_share(a, b)]
        notes += _shift_notes(trials, shifts, work)
        for op, layers in centred.items():
            notes += _centring_note(op, [name for name in layers if trials.can_centre(name, proposals.out_axes[name])])
    except Exception as error:  # whatever a user's model raises at other parameters, or when it is differentiated
        notes.append(f"matrices and shifts between layers could not all be tried numerically ({one_line(error)})")
    return notes


def _chains(proposals: Proposals) -> Iterable[tuple[Mapping[str, Part], Mapping[str, int]]]:
    """Yield, for layers whose sum is read by others alone that are linear, what makes that sum and what reads it."""
    groups: list[set[str]] = []
    for members in [{name} for name in proposals.readers] + proposals.joined:
        for group in [g for g in groups if g & members]:
            members = members | group
            groups.remove(group)
        groups.append(members)
    for group in groups:
        parts = {name: part for source in sorted(group) for name, part in proposals.parts.get(source, {}).items()}
        readers = {name: axis for source in sorted(group) for name, axis in proposals.readers.get(source, {}).items()}
        if readers and not group & proposals.spoiled:
            yield parts, readers


def _chain_note(parts: Mapping[str, Part], readers: Mapping[str, int], out_axes: Mapping[str, int]) -> str:
    makers = sorted(name for name in parts if name in out_axes)
    return (
        f"{shown(map(_layer, (*makers, *readers)))}: no nonlinearity lies between them, so any invertible matrix fits between. "
        "Only rescalings and permutations are moved along, "
        "and measures that look at the size of the parameters depend on the rest"
    )


def _sum_note(a: str, b: str) -> str:
    return f"{_layer(a)} and {_layer(b)} read the same and are added, so only the sum of their weights counts; {DEPENDS}"


def _centring_note(op: str, layers: list[str]) -> list[str]:
    feeding = shown(map(_layer, layers))
    note = f"{op} is unchanged when one vector is added to all rows of what feeds it ({feeding}); {DEPENDS}"
    return [note] if layers else []


def _shift_notes(trials: Trials, shifts: list[str], work: int) -> list[str]:
    if not shifts:
        return []
    num_shifts = trials.num_channels(shifts)
    if num_shifts > _MOST_SHIFTS or 3 * num_shifts * work > _MOST_WORK:
        return [
            f"shifts of {shown(shifts)} may make up for each other: there are too many to try numerically, and if they do, no "
            "move is made along that, and measures that look at the size of the parameters depend on it"
        ]
    free = trials.free_shifts(shifts)
    return [f"shifts of {shown(free)}, which make up for each other; {DEPENDS}"] if free else []


def _free(constraints: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the biases that take part in a shift that no nonlinearity and no output sees."""
    rows = [c for c in constraints if c]
    names = list(dict.fromkeys(name for c in rows for name in c))
    if not names:
        return []
    matrix = np.array([[c.get(name, 0.0) for name in names] for c in rows])
    _, sizes, vectors = np.linalg.svd(matrix)
    null = vectors[int((sizes > 1e-9 * sizes[0]).sum()) :]
    return [name for name, column in zip(names, null.T, strict=True) if np.abs(column).max(initial=0.0) > 1e-9]


def _layer(name: str) -> str:
    return name.removesuffix(".weight")
