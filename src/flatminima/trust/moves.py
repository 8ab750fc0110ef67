"""The moves of an audit: random ones along every kind of symmetry, and the one to the canonical form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from flatminima._errors import FlatminimaError, first_line
from flatminima.objective import Objective
from flatminima.symmetries import Move, Symmetries, canonical_move, check_equivalent
from flatminima.trust.result import SymmetryRecord

__all__ = ["Attacks", "draw_moves", "move_to_canonical"]

_SMALLEST_CHANGE = 1e-3
_MOST_NAMES = 5


@final
@dataclass(frozen=True)
class Attacks:
    """The moves along one kind of symmetry."""

    record: SymmetryRecord
    moves: tuple[Move, ...]


def draw_moves(
    model: nn.Module, symmetries: Symmetries, inputs: object, *, num_moves: int, scale: float, generator: torch.Generator
) -> tuple[list[Attacks], list[str]]:
    """Draw moves along every kind of symmetry and check that the outputs stay; return them, and remarks.

    Raises:
        NotEquivalent: If a move changes the outputs.
    """
    state = dict(model.state_dict())
    found, notes = [], []
    for kind in symmetries.kinds():
        of_kind = symmetries.of_kind(kind)
        moves, difference = [], 0.0
        for _ in range(num_moves):
            first, *others = (symmetry.random(generator, scale, state=state) for symmetry in of_kind)
            move = first
            for other in others:
                move = move.then(other)
            difference = max(
                difference, check_equivalent(model, move.apply(model), inputs, shift_invariant=kind == "softmax shift")
            )
            moves.append(move)
        if not all(_moves_somewhere(move, model) for move in moves):
            notes.append(f"Moves along {kind} did not change the parameters, so it is not tested. Try a larger scale.")
            continue
        record = SymmetryRecord(
            kind=kind,
            dimension=sum(s.dimension for s in of_kind),
            description="; ".join(s.describe() for s in of_kind),
            num_moves=num_moves,
            max_output_difference=difference,
        )
        found.append(Attacks(record, tuple(moves)))
    if not found:
        notes.append("No symmetry was found in this network, so nothing could be moved: the numbers stand untested.")
    return found, notes


def move_to_canonical(objective: Objective, symmetries: Symmetries) -> tuple[Move | None, str, list[str]]:
    """Return the move to the canonical form, the form's name, and remarks; None where no form exists."""
    notes: list[str] = []
    if not set(symmetries.kinds()) - {"permutation"}:
        return None, "", notes
    for form in ("min-trace", "min-norm"):
        try:
            found = canonical_move(objective, symmetries, form)
        except (FlatminimaError, ValueError, RuntimeError) as error:
            notes.append(f"No {form} form: {first_line(error)}")
            continue
        if found.dead_units:
            shown = ", ".join(found.dead_units[:_MOST_NAMES]) + (", …" if len(found.dead_units) > _MOST_NAMES else "")
            notes.append(f"Hidden units without curvature here (inactive, or the loss is flat), without a {form} scale: {shown}.")
        return found.move, form, notes
    return None, "", notes


def _moves_somewhere(move: Move, model: nn.Module) -> bool:
    """Tell whether a move changes the parameters by more than a thousandth of their size."""
    before = {name: p.detach() for name, p in model.named_parameters()}
    after = move.apply_state(before | dict(model.named_buffers()))
    change = sum(float((after[name] - p).square().sum()) for name, p in before.items())
    return change > _SMALLEST_CHANGE**2 * sum(float(p.square().sum()) for p in before.values())
