"""What an audit's numbers mean, in plain sentences. The page and the terminal say the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flatminima.plots.labels import fold_label, titles
from flatminima.plots.numbers import number, typeset
from flatminima.trust import Attack, Audit, MinimumCheck, Reading, Row
from flatminima.trust.verdict import gained_by_training, share_left

__all__ = [
    "UNTESTED",
    "VERDICTS",
    "Finding",
    "Verdict",
    "cost_of",
    "findings",
    "headline",
    "largest_attack",
    "outputs_agree",
    "verdict_of",
]

UNTESTED = "untested"

_TONES = {"slope": "bad", "unknown": "care"}
_MOVES = {"layer": "layer rescaling", "node": "node rescaling", "norm-scale": "rescaling before a norm"}


@dataclass(frozen=True)
class Verdict:
    """A verdict as a mark, a word, and what follows from it."""

    mark: str
    word: str
    meaning: str


VERDICTS = {
    "survives": Verdict(
        "✓",
        "survives",
        "No move along the symmetries changed it. It says something about the function, as far as these symmetries go, and may "
        "be compared between networks that are each at a minimum.",
    ),
    "moves": Verdict(
        "↕",
        "moves",
        "It changed while the network's function did not. It says something about this choice of parameters: do not compare it "
        "between networks. Its value at the canonical form may be compared.",
    ),
    "defect": Verdict(
        "✗",
        "defect",
        "It changed although it is declared not to. The measure, its precision or the network is not what it seems: do not use "
        "the number.",
    ),
    "failed": Verdict("–", "no value", "It could not be computed for this network; the reason stands beside it."),
    UNTESTED: Verdict("?", "not tested", "There was no symmetry to move the network along, so nothing is known about it."),
}


@dataclass(frozen=True)
class Finding:
    """One thing to know.

    Attributes:
        title: The question, or the advice.
        text: The answer, or what it follows from.
        tone: How good the news is: "good", "care", "bad" or "plain".
        items: What it is about: names, each with a number or a reason.
    """

    title: str
    text: str
    tone: str
    items: tuple[tuple[str, str], ...] = ()


def verdict_of(row: Row) -> str:
    """Return the row's verdict; "untested" where no move was made, since a number that nobody pushed has not survived."""
    return UNTESTED if row.verdict == "survives" and not row.attacks else row.verdict


def headline(audit: Audit) -> str:
    """Return the result in one sentence."""
    verdicts = [verdict_of(row) for row in audit.rows]
    if not verdicts:
        return "Nothing was measured yet."
    if all(verdict in (UNTESTED, "failed") for verdict in verdicts):
        return "The numbers stand untested: no symmetry was found to move the network along."
    survive, total = verdicts.count("survives"), len(verdicts)
    if survive == total:
        return f"All {total} numbers survive." if total > 1 else "The number survives."
    if not survive:
        return f"None of the {total} numbers survives." if total > 1 else "The number does not survive."
    return f"{survive} of {total} numbers {'survives' if survive == 1 else 'survive'}."


def findings(audit: Audit) -> list[Finding]:
    """Return what the audit found, most important first."""
    named = [(row, name) for row, name in zip(audit.rows, titles(audit.rows).values(), strict=True)]
    groups = {verdict: [(row, name) for row, name in named if verdict_of(row) == verdict] for verdict in VERDICTS}
    found = [_minimum(audit)]
    if group := groups["defect"]:
        found.append(Finding("Do not use", VERDICTS["defect"].meaning, "bad", _moved(group)))
    if group := groups["survives"]:
        text = f"No move changed {'it, so it describes' if len(group) == 1 else 'them, so they describe'} the function itself."
        title, tone = "May be compared between networks", "good"
        if audit.minimum is not None and audit.minimum.verdict == "unknown":
            text += " But compare them only if you know that training has ended: it cannot be told whether this is a minimum."
            title, tone = "Unchanged, if at a minimum", "care"
        elif audit.minimum is not None and audit.minimum.verdict != "minimum":
            text += " But this is no minimum, so they are passing values: compare them when training has ended."
            title, tone = "Unchanged, but not at a minimum", "care"
        if any(note.startswith("Not covered") for note in audit.notes):
            text += " Symmetries that they were not tested against are named in the notes."
        found.append(Finding(title, text, tone, tuple((name, "") for _, name in group)))
    if group := groups["moves"]:
        text = (
            f"The function stayed the same, so {'this describes' if len(group) == 1 else 'these describe'} the parameters that "
        )
        text += "happen to stand for it. Compare values at the canonical form instead."
        found.append(Finding("Do not compare between networks", text, "care", _moved(group)))
    if group := groups[UNTESTED]:
        found.append(Finding("Not tested", VERDICTS[UNTESTED].meaning, "care", tuple((name, "") for _, name in group)))
    if group := groups["failed"]:
        items = tuple((name, _reason(row)) for row, name in group)
        found.append(Finding("No value", "What could not be computed, and why:", "bad", items))
    return found


def largest_attack(row: Row) -> Attack | None:
    """Return the attack that moved the number most; one without a factor counts as more than any factor."""
    known = [attack for attack in row.attacks if attack.verdict != "failed"]
    return max(known, key=lambda attack: math.inf if attack.fold is None else attack.fold, default=None)


def cost_of(reading: Reading) -> str:
    """Return what a reading took."""
    parts = [
        _counted(reading.num_products, "product"),
        _counted(reading.num_gradients, "gradient"),
        _counted(reading.num_losses, "forward pass", "forward passes"),
    ]
    return ", ".join([part for part in parts if part] + [f"{reading.seconds:.1f} s"])


def _minimum(audit: Audit) -> Finding:
    check = audit.minimum
    if check is None:
        return Finding("Is this a minimum?", "This was not looked at.", "plain")
    return Finding("Is this a minimum?", _point(check), _TONES.get(check.verdict, "plain"))


def _point(check: MinimumCheck) -> str:
    """Say what training can still gain, how the loss bends, and what the point is therefore."""
    loss, fall = _typeset(check.loss), _typeset(check.expected_fall)
    share, of = _share(check.expected_fall, check), _whole(check)
    if check.verdict == "slope":
        return (
            f"Training is unfinished: to second order a step would lower the loss of {loss} by {fall} or more, {share} of {of}."
        )
    if check.verdict == "saddle":
        return (
            f"The loss is {loss}. It bends down (the smallest eigenvalue of the Hessian is {_extremes(check)}), and along such a "
            f"direction it falls by {_typeset(check.saddle_fall)}, {_share(check.saddle_fall, check)} of {of}: a saddle."
        )
    if check.verdict == "unknown":
        return (
            f"That cannot be told. The loss of {loss} still slopes, along parameters for which the Gauss–Newton matrix has no "
            "upward curvature: the loss is linear in the outputs, as absolute errors are, or bends down there. So nothing says "
            "how far it would fall."
        )
    left = f"what training can still gain, {fall}, is {share} of {of}"
    if check.expected_fall == 0:
        left = "what training can still gain is less than its rounding"
    return f"The loss is {loss}, and {left}. {_curvature(check)}"


def _curvature(check: MinimumCheck) -> str:
    """Say how the loss bends at what counts as a minimum."""
    if check.smallest_eigenvalue < -check.noise:
        return (
            f"A minimum for practical purposes; the most negative curvature is {_extremes(check)}, but no such direction "
            "leads far down."
        )
    return "No curvature is negative beyond rounding: to second order a minimum, flat directions aside."


def _extremes(check: MinimumCheck) -> str:
    return f"{_typeset(check.smallest_eigenvalue)}, beside a largest of {_typeset(check.largest_eigenvalue)}"


def _share(fall: float, check: MinimumCheck) -> str:
    """Return which share a fall is of all that training can gain."""
    share = share_left(fall, gained_by_training(check.loss, check.reference_loss))
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}" if share >= 0.001 else "less than 0.1%"


def _whole(check: MinimumCheck) -> str:
    if check.reference_loss is None:
        return "the loss"
    return f"all that it can gain over outputs that ignore the inputs (loss {_typeset(check.reference_loss)})"


def _moved(group: Sequence[tuple[Row, str]]) -> tuple[tuple[str, str], ...]:
    parts = []
    for row, name in group:
        attack = largest_attack(row)
        if attack is None:
            parts.append((name, ""))
            continue
        parts.append((name, f"{typeset(fold_label(row.base, attack))} by {_MOVES.get(attack.symmetry, attack.symmetry)}"))
    return tuple(parts)


def _reason(row: Row) -> str:
    reasons = [row.base.error, *(reading.error for attack in row.attacks for reading in attack.readings)]
    return next((reason for reason in reasons if reason), "no value")


def _counted(count: int, one: str, many: str = "") -> str:
    return "" if not count else f"{count:,} {one}" if count == 1 else f"{count:,} {many or one + 's'}"


def outputs_agree(audit: Audit) -> str:
    """Return how closely the outputs agreed over all moves, as text."""
    differences = [record.max_output_difference for record in audit.symmetries]
    known = [d for d in differences if d is not None and math.isfinite(d)]
    return _typeset(max(known), 2) if known and len(known) == len(differences) else "an unknown amount"


def _typeset(value: float, digits: int = 3) -> str:
    return typeset(number(value, digits))
