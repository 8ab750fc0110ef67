"""How far the moves along the symmetries changed each measure: one line a measure, one marker a kind of symmetry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from flatminima.plots.labels import fold_label, kinds, titles
from flatminima.plots.numbers import typeset
from flatminima.plots.style import ALARM, INK, MUTED, dress, look, new_axes, plain_ticks, say
from flatminima.trust import Attack, Audit, Row

__all__ = ["fold_changes"]

_NAME_LENGTH = 40
_SHIFT = 0.15  # between two kinds of one measure, in rows


def fold_changes(audit: Audit, ax: Axes | None = None, *, names: Literal["beside", "above"] = "beside") -> Axes:
    """Draw the fold change of every measure under every kind of symmetry, on a log scale; the most moved measure is on top.

    A small marker is one random move, a large one the largest of them. It is filled where the measure declares that the
    symmetry leaves it unchanged, and open where it does not. A value that changed its sign, or grew without bound, has no
    factor: it stands at the right edge with an arrow.

    Args:
        audit: What to draw.
        ax: Where to draw; None makes a figure of its own.
        names: Put the measures' names "beside" the axis, or "above" their lines (for narrow figures).

    Returns:
        The axes.
    """
    names_of = titles(audit.rows)
    named = sorted(((row, names_of[i]) for i, row in enumerate(audit.rows) if row.attacks), key=_most, reverse=True)
    rows = [row for row, _ in named]
    shown = kinds(rows)
    ax = new_axes(7.6, 1.5 + 0.44 * max(len(rows), 3)) if ax is None else ax
    if not rows:
        return say(ax, "No number was tested: no symmetry was found.")
    edge = _edge(rows)
    for kind in shown:
        _draw_kind(ax, kind, shown, rows, edge)
    for place, row in enumerate(rows):
        _write_label(ax, place, row, shown, edge)
    _scale(ax, rows, edge)
    _name_rows(ax, [name for _, name in named], names)
    dress(ax, grid="x")
    ax.axvline(1.0, color=MUTED, linewidth=1.0)
    ax.tick_params(axis="y", length=0, labelcolor=INK)
    moves = _counted(max(len(attack.folds) for row in rows for attack in row.attacks), "move")
    ax.set_xlabel(
        f"fold change (new/old or old/new), {moves} a symmetry, log scale"
        if names == "beside"
        else f"fold change, {moves} a symmetry, log scale"
    )
    _legend(ax, shown, num_columns=3 if names == "beside" else 2)
    return ax


def _draw_kind(ax: Axes, kind: str, shown: Sequence[str], rows: Sequence[Row], edge: float) -> None:
    """Draw all measures under one kind; few artists with many points each, since artists are what takes time."""
    style, points = look(kind, shown), []
    for place, row in enumerate(rows):
        points += [(y, a) for y, a in _attacks(place, row, shown) if a.symmetry == kind and a.folds and a.verdict != "failed"]
    ends = [_end(attack, edge) for _, attack in points]
    ys = [y for y, _ in points]
    ax.hlines(ys, 1.0, ends, color=style.colour, linewidth=1.2, alpha=0.55)
    moves = [(_place(f, edge), y) for y, attack in points for f in attack.folds]
    ax.plot(
        [x for x, _ in moves], [y for _, y in moves], linestyle="none", marker=style.marker, markersize=2.8, color=style.colour
    )
    for declared in (True, False):
        for bounded in (True, False):
            chosen = [i for i, (_, a) in enumerate(points) if a.declared_invariant == declared and _bounded(a) == bounded]
            if not chosen:
                continue  # an empty line that is not clipped would claim room in the layout
            ax.plot(
                [ends[i] for i in chosen], [ys[i] for i in chosen], linestyle="none", marker=style.marker if bounded else ">",
                markersize=6.5, markeredgewidth=1.4, markeredgecolor=style.colour,
                markerfacecolor=style.colour if declared else "none", clip_on=False,
            )  # fmt: skip


def _write_label(ax: Axes, place: int, row: Row, shown: Sequence[str], edge: float) -> None:
    """Write the largest factor of a measure, or every one that is a defect, beside its marker."""
    labels = [(_end(attack, edge), y, *_label(row, attack)) for y, attack in _attacks(place, row, shown)]
    alarms = [label for label in labels if label[3] == ALARM]
    for x, y, text, colour in alarms or [max(labels, key=lambda label: label[0])]:
        if text:
            ax.annotate(
                text, (x, y), xytext=(9, 0), textcoords="offset points", va="center", ha="left", color=colour, fontsize="small",
                annotation_clip=False,
            )  # fmt: skip


def _attacks(place: int, row: Row, shown: Sequence[str]) -> list[tuple[float, Attack]]:
    """Return the attacks on a measure with their heights, side by side around its line."""
    attacks = sorted(row.attacks, key=lambda attack: shown.index(attack.symmetry))
    return [(place + (index - (len(attacks) - 1) / 2) * _SHIFT, attack) for index, attack in enumerate(attacks)]


def _end(attack: Attack, edge: float) -> float:
    return 1.0 if attack.verdict == "failed" else max((_place(f, edge) for f in attack.folds), default=1.0)


def _place(fold: float | None, edge: float) -> float:
    return edge if fold is None else min(fold, edge)


def _label(row: Row, attack: Attack) -> tuple[str, str]:
    text = typeset(fold_label(row.base, attack))
    if attack.verdict == "defect":
        return f"{text}, defect", ALARM
    return ("", INK) if attack.verdict == "survives" else (text, MUTED if attack.verdict == "failed" else INK)


def _scale(ax: Axes, rows: Sequence[Row], edge: float) -> None:
    ax.set_xscale("log")
    ax.set_xlim(10 ** (-0.02 * math.log10(edge)), edge * 10 ** (0.16 * math.log10(edge)))
    ax.set_ylim(len(rows) - 0.4, -0.8)
    decades = int(math.log10(edge))
    step = max(1, math.ceil(decades / 6))
    ax.xaxis.set_major_locator(FixedLocator([10.0**power for power in range(0, decades + 1, step)]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _place: _tick(value)))


def _name_rows(ax: Axes, titles: Sequence[str], names: Literal["beside", "above"]) -> None:
    shown = [title if len(title) <= _NAME_LENGTH else title[: _NAME_LENGTH - 1] + "…" for title in titles]
    if names == "beside":
        ax.set_yticks(range(len(shown)), shown)
        plain_ticks(ax)
        return
    ax.set_yticks([])
    for place, name in enumerate(shown):
        ax.annotate(
            name, (0.0, place - 0.33), xycoords=("axes fraction", "data"), xytext=(10, 0), textcoords="offset points",
            ha="left", va="bottom", color=INK, parse_math=False,
        )  # fmt: skip


def _legend(ax: Axes, shown: Sequence[str], num_columns: int) -> None:
    handles = []
    for kind in shown:
        style = look(kind, shown)
        handles.append(Line2D([], [], color=style.colour, marker=style.marker, markersize=6.5, linewidth=1.2, label=kind))
    for label, face in (("declared unchanged", MUTED), ("declared to change", "none")):
        handles.append(
            Line2D([], [], color=MUTED, marker="o", markersize=6.5, linestyle="none", markerfacecolor=face, label=label)
        )
    legend = ax.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=num_columns, frameon=False, labelcolor=INK,
        borderaxespad=0.2, handletextpad=0.5, columnspacing=1.3,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)


def _most(named: tuple[Row, str]) -> float:
    return max((math.inf if a.fold is None else a.fold) if a.verdict != "failed" else 0.0 for a in named[0].attacks)


def _edge(rows: Sequence[Row]) -> float:
    """Return the right end of the scale: a power of ten beyond every factor there is."""
    known = [f for row in rows for a in row.attacks for f in a.folds if f is not None and math.isfinite(f)]
    return float(10.0 ** max(1, math.ceil(math.log10(max([1.0, *known])) + 1e-9)))


def _bounded(attack: Attack) -> bool:
    return attack.fold is not None and math.isfinite(attack.fold)


def _tick(value: float) -> str:
    power = round(math.log10(value))
    return f"×{10**power:,}" if power < 4 else typeset(f"×1e{power}").replace("1×", "")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
