"""Colours and axes that all drawings share.

The colours are those of Okabe & Ito (2008), which people with any of the common colour-vision deficiencies can tell apart;
every kind also has a marker of its own, so that a print in grey can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = [
    "ACCENT",
    "ALARM",
    "ALL_LOOKS",
    "GRID",
    "INK",
    "MUTED",
    "SECOND",
    "Look",
    "dress",
    "look",
    "new_axes",
    "plain_ticks",
    "say",
]

INK = "#1b1f24"
MUTED = "#57606a"
GRID = "#d5dbe1"
ACCENT = "#0072b2"
SECOND = "#d55e00"
ALARM = "#b3142b"


@dataclass(frozen=True)
class Look:
    """How a series is drawn."""

    colour: str
    marker: str


_LOOKS = {
    "layer": Look(ACCENT, "o"),
    "node": Look(SECOND, "s"),
    "permutation": Look("#009e73", "^"),
    "norm-scale": Look("#cc79a7", "D"),
    "softmax shift": Look("#e69f00", "v"),
}
_FURTHER = (Look("#56b4e9", "P"), Look("#8a6d3b", "X"), Look("#6f6f8f", "h"))
ALL_LOOKS = (*_LOOKS.values(), *_FURTHER)


def look(kind: str, kinds: Sequence[str]) -> Look:
    """Return the look of a kind of symmetry; one that is not known gets the next free look by its place among ``kinds``."""
    if kind in _LOOKS:
        return _LOOKS[kind]
    unknown = [other for other in kinds if other not in _LOOKS]
    return _FURTHER[unknown.index(kind) % len(_FURTHER)]


def new_axes(width: float, height: float) -> Axes:
    """Return axes on a figure of their own, in inches; pyplot and its backend are not touched."""
    return Figure(figsize=(width, height), layout="constrained").add_subplot()


def dress(ax: Axes, *, grid: str) -> None:
    """Take away the frame, draw a light grid along one axis, and mute the ticks."""
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(GRID)
    ax.tick_params(which="both", color=GRID, labelcolor=MUTED)
    ax.xaxis.label.set_color(MUTED)
    ax.yaxis.label.set_color(MUTED)
    ax.grid(visible=True, axis="x" if grid == "x" else "y", color=GRID, linewidth=0.7)
    ax.set_axisbelow(True)


def plain_ticks(ax: Axes) -> None:
    """Show tick labels as they are: a name with a dollar sign is not a formula."""
    for label in (*ax.get_xticklabels(), *ax.get_yticklabels()):
        label.set_parse_math(False)


def say(ax: Axes, text: str) -> Axes:
    """Write a sentence instead of a drawing, where there is nothing to draw."""
    ax.set_axis_off()
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=MUTED, parse_math=False)
    return ax
