"""The results of the curvature benchmark: what was measured, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.works import WORKS, Work

__all__ = ["OURS", "Cell", "Entry", "ratios"]

OURS = "flatminima"


@dataclass
class Entry:
    """What one participant did.

    Attributes:
        times: Median, 10th and 90th percentile of the seconds that count, or None.
        rounds: Rounds behind them.
        peak: Peak memory in bytes, or None.
        fault: "" where the result is right; else "wrong …", "out of time", "–" for cannot, or an error.
        note: What else a reader may want.
    """

    times: tuple[float, float, float] | None = None
    rounds: int = 0
    peak: int | None = None
    fault: str = ""
    note: str = ""


@dataclass
class Cell:
    """One work on one network.

    Attributes:
        network: Name in the table.
        gradient: Seconds of a plain gradient.
        entries: By participant.
    """

    network: str
    work: Work
    gradient: float
    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def bound(self) -> float | None:
        return self.work.bound.get(self.network, self.work.bound.get(""))

    def best(self, of: str) -> tuple[str, float] | None:
        """Return the peer with the least of "times" or "peak" among those that are right, and its value."""
        found = []
        for name, entry in self.entries.items():
            value = entry.peak if of == "peak" else entry.times and entry.times[0]
            if name != OURS and not entry.fault and value:
                found.append((value, name))
        return (min(found)[1], float(min(found)[0])) if found else None

    def lines(self) -> list[str]:
        """Return the details, one line a participant."""
        lines = [f"{self.network}: {self.work.title}"]
        for name, entry in self.entries.items():
            if entry.fault == "–":
                continue
            what = f"  {name:<20}"
            if entry.times:
                median, low, high = (t / self.gradient / self.work.products for t in entry.times)
                what += f"{_number(median):>8} gradients  ({_number(low)} … {_number(high)}, rounds: {entry.rounds})"
            if entry.peak is not None:
                what += f"  {entry.peak / 2**20:6.0f} MiB"
            lines.append("  ".join(part for part in (what.ljust(80), entry.fault, entry.note) if part).rstrip())
        return lines

    def summary(self) -> str:
        """Return the cell of the table."""
        mine = self.entries.get(OURS)
        if mine is None:
            return ""
        if mine.fault or not mine.times:
            return mine.fault or "no time"
        cost = f"{_number(mine.times[0] / self.gradient / self.work.products)} g"
        fastest, leanest = self.best("times"), self.best("peak")
        if fastest is None or self.bound is None:
            return f"{cost}; no peer" if self.bound is not None else cost
        ratio = mine.times[0] / fastest[1]
        text = f"{cost}; {_ratio(ratio)} {_verdict(ratio, self.bound)} {fastest[0]}"
        if leanest is not None and mine.peak:
            memory = mine.peak / leanest[1]
            text += f"; memory {_ratio(memory)} {_verdict(memory, self.work.memory_bound)}"
        return text


def ratios(cells: Sequence[Cell], networks: Mapping[str, str]) -> str:
    """Return the table of ratios as Markdown; ``networks`` gives the headings by name."""
    rows = [["work", *(f"{name} ({told})" for name, told in networks.items())]]
    rows.append(["---"] * len(rows[0]))
    by_place = {(cell.work.key, cell.network): cell for cell in cells}
    for key, work in WORKS.items():
        row = [by_place[key, name].summary() if (key, name) in by_place else "" for name in networks]
        if any(row):
            rows.append([work.title, *row])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _verdict(ratio: float, bound: float) -> str:
    return f"✓ ≤ {bound:g}" if ratio <= bound else f"over {bound:g}"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.095 else f"{value:.2g}"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 9.95 else f"{value:.1f}" if value < 99.5 else f"{value:,.0f}"
