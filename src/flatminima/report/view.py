"""An audit as what the page's templates print: text, tooltips and sort keys, no logic left."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flatminima.plots.labels import fold_label, kinds, titles
from flatminima.plots.numbers import number, typeset, with_error
from flatminima.report.words import VERDICTS, cost_of, verdict_of
from flatminima.trust import Attack, Audit, Reading, Row

__all__ = ["Cell", "Line", "Parts", "Table", "flat_settings", "parts", "table"]

_ORDER = ("defect", "failed", "moves", "untested", "survives")


@dataclass(frozen=True)
class Cell:
    """One number of the trust table.

    Attributes:
        label: Heading of its column.
        text: What is shown.
        tip: What it means, in sentences.
        key: What it is sorted by: a number as text, "" where there is none (sorted last).
        verdict: Key of ``VERDICTS``, or "".
        note: Small print beside the number.
        declared: Whether the measure is declared not to change, in a column of moves; None elsewhere.
    """

    label: str
    text: str
    tip: str
    key: str
    verdict: str = ""
    note: str = ""
    declared: bool | None = None


@dataclass(frozen=True)
class Line:
    """One measure of the trust table."""

    place: int
    title: str
    row: Row
    verdict: str
    tip: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """The trust table.

    Attributes:
        columns: Headings; the verdict stands beside the measure.
        lines: One per measure.
        counts: How many lines have each verdict that occurs, in the order of the filter's buttons.
    """

    columns: tuple[Cell, ...]
    lines: tuple[Line, ...]
    counts: dict[str, int]


@dataclass(frozen=True)
class Parts:
    """What a rise of the loss is made of: slope and curvature, as text and as shares in per cent."""

    title: str
    value: str
    first: str
    second: str
    first_share: float
    second_share: float


def table(audit: Audit) -> Table:
    """Return the trust table of an audit."""
    shown, names = kinds(audit.rows), titles(audit.rows)
    has_canonical = any(row.canonical is not None for row in audit.rows)
    lines = tuple(_line(place, row, names[place], shown, has_canonical) for place, row in enumerate(audit.rows))
    verdicts = [line.verdict for line in lines]
    counts = {verdict: verdicts.count(verdict) for verdict in ("survives", "moves", "defect", "failed", "untested")}
    return Table(_columns(shown, has_canonical), lines, {key: count for key, count in counts.items() if count})


def parts(audit: Audit) -> list[Parts]:
    """Return the first- and second-order parts of the perturbation measures."""
    found = []
    for place, title in titles(audit.rows).items():
        base = audit.rows[place].base
        first, second = base.details.get("first_order"), base.details.get("second_order")
        if not isinstance(first, int | float) or not isinstance(second, int | float):
            continue
        total = abs(first) + abs(second)
        share = 100 * abs(first) / total if total and math.isfinite(total) else 0.0
        value = typeset(with_error(base.value, base.stderr))
        rest = 100 - share if total and math.isfinite(total) else 0.0
        found.append(Parts(title, value, typeset(number(first)), typeset(number(second)), share, rest))
    return found


def flat_settings(settings: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Return settings as pairs of a name in words and the lines of its value."""
    found: list[tuple[str, list[str]]] = []
    for key, value in settings.items():
        name = str(key).replace("_", " ")
        if isinstance(value, dict):
            found.append((name, [f"{inner}: {_plain(item)}" for inner, item in value.items()] or ["none"]))
        elif isinstance(value, list | tuple):
            found.append((name, [_plain(item) for item in value] or ["none"]))
        else:
            found.append((name, [_plain(value)]))
    return found


def _columns(shown: Sequence[str], has_canonical: bool) -> tuple[Cell, ...]:
    columns = [Cell("Measure", "Measure", "The sharpness measure, with its meaning.", "text")]
    columns.append(Cell("Verdict", "Verdict", "Whether the number can be compared between networks.", "number"))
    columns.append(Cell("Value", "Value", "At the network as it is, with its standard error where it is estimated.", "number"))
    for kind in shown:
        tip = f"The largest factor by which random moves along the symmetry “{kind}” changed the value."
        columns.append(Cell(kind, kind, tip, "number"))
    if has_canonical:
        tip = "The value at the canonical form: one network that stands for all that the symmetries turn into each other."
        columns.append(Cell("Canonical", "Canonical", tip, "number"))
    return tuple(columns)


def _line(place: int, row: Row, title: str, shown: Sequence[str], has_canonical: bool) -> Line:
    verdict, known = verdict_of(row), {attack.symmetry: attack for attack in row.attacks}
    cells = [Cell("Verdict", VERDICTS[verdict].word, VERDICTS[verdict].meaning, str(_ORDER.index(verdict)), verdict)]
    cells += [Cell("Value", _text(row.base), f"{row.meaning} {_how(row.base)}", _key(row.base.value), note=_note(row.base))]
    cells += [_attack_cell(row, known[kind]) if kind in known else _no_attack(kind) for kind in shown]
    if has_canonical:
        cells.append(_canonical_cell(row.canonical))
    return Line(place, title, row, verdict, f"{row.meaning} {row.formula}", tuple(cells))


def _attack_cell(row: Row, attack: Attack) -> Cell:
    values = ", ".join(typeset(number(reading.value)) for reading in attack.readings)
    count = len(attack.readings)
    tip = [f"{count} random {'move' if count == 1 else 'moves'} along “{attack.symmetry}” gave {values}."]
    tip.append(f"Declared {'not to change' if attack.declared_invariant else 'to change'}.")
    if attack.verdict == "survives" and attack.fold is not None and attack.fold > 1 + 1e-6:
        tip.append("The change is within the standard error.")
    elif attack.verdict == "survives":
        tip.append("It did not change.")
    elif attack.verdict == "failed":
        tip.append(next((reading.error for reading in attack.readings if reading.error), ""))
    else:
        tip.append(f"The largest change: {typeset(fold_label(row.base, attack))}.")
    key = "" if attack.verdict == "failed" else _key(math.inf if attack.fold is None else attack.fold)
    text = "" if attack.verdict == "failed" else typeset(fold_label(row.base, attack))
    tips = " ".join(part for part in tip if part)
    return Cell(attack.symmetry, text, tips, key, attack.verdict, declared=attack.declared_invariant)


def _no_attack(kind: str) -> Cell:
    return Cell(kind, "–", f"This number was not moved along “{kind}”.", "")


def _canonical_cell(reading: Reading | None) -> Cell:
    if reading is None:
        return Cell("Canonical", "–", "There is no value at the canonical form.", "")
    tip = "The same for every network that the symmetries turn this one into: the number to compare between networks."
    return Cell("Canonical", _text(reading), f"{tip} {_how(reading)}", _key(reading.value), note=_note(reading))


def _text(reading: Reading) -> str:
    return typeset(with_error(reading.value, reading.stderr))


def _note(reading: Reading) -> str:
    return "not converged" if reading.value is not None and not reading.converged else ""


def _how(reading: Reading) -> str:
    if reading.error:
        return f"No value: {reading.error}"
    how = [f"Obtained by: {reading.method}, {cost_of(reading)}."]
    if reading.stderr:
        share = abs(reading.stderr / reading.value) if reading.value else math.inf
        relative = f", {share:.1%} of the value" if math.isfinite(share) else ""
        how.append(f"Standard error {typeset(number(reading.stderr, 2))}{relative}.")
    if reading.interval is not None:
        low, high = (typeset(number(end)) for end in reading.interval)
        how.append(f"95 % interval: {low} to {high}, from {reading.num_samples:,} samples.")
    if not reading.converged:
        how.append("The tolerance that was asked for was not met.")
    return " ".join(how)


def _key(value: float | None) -> str:
    if value is None or math.isnan(value):
        return ""
    return repr(float(value)).replace("inf", "Infinity")


def _plain(value: object) -> str:
    if value is None or value == "":
        return "none"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | tuple) else str(value)
