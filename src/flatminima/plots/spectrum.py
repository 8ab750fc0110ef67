"""Both ends of a spectrum, each eigenvalue with its residual."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator

from flatminima.plots.numbers import number, typeset
from flatminima.plots.style import ACCENT, INK, MUTED, SECOND, dress, new_axes, say
from flatminima.trust import Audit, Spectrum

__all__ = ["spectrum"]

_GAP = 2  # empty places between the two ends, where the eigenvalues that were not computed lie


def spectrum(result: Audit | Spectrum, ax: Axes | None = None) -> Axes:
    """Draw the largest and the smallest eigenvalues of the Hessian that were computed, with their residuals as error bars.

    The residual ‖Hv − λv‖ bounds the distance to an eigenvalue. The axis is the value itself: what looks like zero beside the
    largest is zero beside the largest.

    Args:
        result: An audit, or the spectrum alone.
        ax: Where to draw; None makes a figure of its own.

    Returns:
        The axes.
    """
    found = result.spectrum if isinstance(result, Audit) else result
    ax = new_axes(6.4, 3.6) if ax is None else ax
    if found is None or not _known(found.largest + found.smallest):
        return say(ax, "The spectrum was not computed.")
    num_largest, num_smallest = len(found.largest), len(found.smallest)
    residuals = found.residuals or (0.0,) * (num_largest + num_smallest)
    _stems(ax, 0, found.largest, residuals[:num_largest], ACCENT, "o", "largest")
    start = num_largest + (_GAP if num_largest else 0)
    _stems(ax, start, found.smallest, residuals[num_largest:], SECOND, "s", "smallest")
    ax.axhline(0.0, color=MUTED, linewidth=0.8)
    dress(ax, grid="y")
    _label(ax, found, start)
    ax.margins(y=0.14)
    if num_largest and num_smallest:
        ax.legend(frameon=False, labelcolor=INK, loc="upper right")
    return ax


def _stems(
    ax: Axes, start: int, values: tuple[float, ...], residuals: tuple[float, ...], colour: str, marker: str, which: str
) -> None:
    places = [start + i for i, value in enumerate(values) if _finite(value)]
    known = [value for value in values if _finite(value)]
    if not known:
        return
    errors = [r if _finite(r) else 0.0 for r, value in zip(residuals, values, strict=False) if _finite(value)]
    errors += [0.0] * (len(known) - len(errors))
    ax.vlines(places, 0.0, known, color=colour, linewidth=1.5, alpha=0.45)
    label = f"{len(known)} {which}"
    ax.errorbar(places, known, yerr=errors, linestyle="none", marker=marker, markersize=6, color=colour, capsize=3, label=label)


def _label(ax: Axes, found: Spectrum, start: int) -> None:
    num_largest, num_smallest = len(found.largest), len(found.smallest)
    ends = [(0, found.largest[0])] if found.largest else []
    ends += [(start + num_smallest - 1, found.smallest[-1])] if found.smallest else []
    for place, value in ends:
        if _finite(value):
            above = value >= 0
            offset = (0, 8) if above else (0, -8)
            ax.annotate(
                typeset(number(value)), (place, value), xytext=offset, textcoords="offset points", color=INK,
                ha="left" if place == 0 else "center", va="bottom" if above else "top",
            )  # fmt: skip
    step = math.ceil((num_largest + num_smallest) / _most_ticks(ax))
    top = [i for i in range(num_largest) if i % step == 0]
    bottom = [i for i in range(num_smallest) if (num_smallest - 1 - i) % step == 0]
    ax.xaxis.set_major_locator(FixedLocator([*top, *(start + i for i in bottom)]))
    ax.set_xticklabels([str(i + 1) for i in top] + [f"n−{num_smallest - 1 - i}".removesuffix("−0") for i in bottom])
    ax.set_xlabel("rank of the eigenvalue (1 largest, n smallest)")
    ax.set_ylabel("eigenvalue λ of the Hessian")


def _most_ticks(ax: Axes) -> int:
    """Return how many labels such as "n−12" find room side by side."""
    inches = ax.get_window_extent().width / ax.figure.dpi
    return max(2, int(inches / 0.42))


def _known(values: tuple[float, ...]) -> list[float]:
    return [value for value in values if _finite(value)]


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
