"""What the terminal shows: the trust table, the list of measures, and how far the work is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from flatminima import _progress
from flatminima.plots.numbers import number, typeset
from flatminima.report.view import Cell, Line, table
from flatminima.report.words import VERDICTS, findings, headline
from flatminima.trust import Audit

__all__ = ["print_audit", "print_measures", "progress_bar"]

_STYLES = {"survives": "green", "moves": "yellow", "defect": "bold red", "failed": "red", "untested": "dim", "": ""}
_FOOTNOTES = {
    "≈": "a change within the standard errors",
    "°": "unchanged here, though the measure is not declared invariant",
    "*": "not converged",
}
_UNCHANGED = "×1"
_WIDTH_WITHOUT_TERMINAL, _NARROW, _MESSAGE = 120, 100, 44


@contextmanager
def progress_bar(*, hidden: bool) -> Iterator[_progress.Progress]:
    """Show how far the work is on stderr, with the time that is left; nothing where stderr is no terminal."""
    console = Console(stderr=True)
    if hidden or not console.is_terminal:
        yield _progress.no_progress
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False, table_column=Column(min_width=_MESSAGE)),  # so that the bar stands still
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield _Stages(bar)


class _Stages:
    """One line of progress; it starts anew when the total changes, as from training to measuring."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task: TaskID | None = None
        self._stage: tuple[int, int | None] = (0, -1)

    def __call__(self, done: int, total: int | None, message: str) -> None:
        before, of = self._stage
        self._stage = (done, total)
        if self._task is None or done < before:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(message, total=total)
        elif total != of:
            self._bar.update(self._task, total=total)
        self._bar.update(self._task, completed=done, description=message)


def print_audit(audit: Audit, files: Sequence[Path]) -> None:
    """Print an audit's trust table, what it is about above, and what it took below."""
    console = _console()
    console.print()
    console.print(_preamble(audit))
    console.print()
    if audit.rows:
        console.print(_trust_table(audit) if console.width >= _NARROW + 10 else _trust_list(audit))
        console.print(_key(audit))
        console.print()
    console.print(Text(headline(audit), style="bold"))
    for note in audit.notes:
        console.print(Text(f"Note: {note}", style="dim"))
    counts = f"{audit.num_products:,} curvature products, {audit.num_gradients:,} gradients, {audit.num_losses:,} forward passes"
    console.print(Text(f"{counts}, {audit.seconds:.1f} s", style="dim"))
    console.print(Text(f"Written: {', '.join(str(file) for file in files)}"), soft_wrap=True)


def print_measures(declarations: Sequence[Mapping[str, Any]]) -> None:
    """Print what every measure declares of itself."""
    console = _console()
    if console.width < _NARROW:
        for declared in declarations:
            console.print(_described(declared))
        return
    kinds = list(dict.fromkeys(kind for declared in declarations for kind in declared["invariances"]))
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    shown.add_column("measure", no_wrap=True)
    shown.add_column("formula, source, cost", ratio=1)
    for kind in kinds:
        shown.add_column(Text(kind.replace(" ", "\n").replace("-", "-\n")), justify="center", vertical="top")
    for declared in declarations:
        text = Text(f"{declared['formula']}\n")
        text.append(f"{declared['source']}\n{declared['cost']}\n", style="dim")
        marks = [Text("yes", style="green") if declared["invariances"][kind] else Text("no", style="yellow") for kind in kinds]
        shown.add_row(Text(declared["key"], style="bold"), text, *marks)
    console.print(shown)
    console.print(Text("yes: a move along this symmetry leaves the value unchanged. An audit holds it to that, on your network."))


def _described(declared: Mapping[str, Any]) -> Text:
    """Return a measure as lines, for a terminal too narrow for a table."""
    unchanged = [kind for kind, invariant in declared["invariances"].items() if invariant]
    text = Text(declared["key"], style="bold")
    lines = (declared["formula"], declared["source"], declared["cost"], f"unchanged by: {', '.join(unchanged) or 'nothing'}")
    text.append("".join(f"\n  {line}" for line in lines) + "\n", style="not bold")
    return text


def _console() -> Console:
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return Console(highlight=False)
    return Console(highlight=False, width=_WIDTH_WITHOUT_TERMINAL)


def _preamble(audit: Audit) -> Table:
    what = Text(audit.target, style="bold")
    what.append(f": {audit.num_parameters:,} parameters, {audit.num_examples:,} examples, {audit.loss_name}", style="not bold")
    lines = Table.grid(padding=(0, 1))
    lines.add_row("Audited", what)
    if audit.minimum is not None:
        check = audit.minimum
        numbers = (
            f"loss {_printed(check.loss)}, ‖∇L‖ {_printed(check.gradient_norm)}, "
            f"λ_min {_printed(check.smallest_eigenvalue)} (residual {_printed(check.smallest_residual, 2)}), "
            f"λ_max {_printed(check.largest_eigenvalue)}"
        )
        lines.add_row("Minimum?", Text(findings(audit)[0].text))
        lines.add_row("", Text(numbers, style="dim"))
    if not audit.symmetries:
        lines.add_row("Moved", "nowhere: no symmetry was found")
    for place, record in enumerate(audit.symmetries):
        size = f"dimension {record.dimension}" if record.dimension else "finite"
        moves = f"{record.num_moves} move{'' if record.num_moves == 1 else 's'}"
        agree = f"outputs agree to {_printed(record.max_output_difference, 2)}"
        lines.add_row("" if place else "Moved", Text(f"along {record.kind} ({size}), {moves}, {agree}"))
    return lines


def _trust_table(audit: Audit) -> Table:
    content = table(audit)
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    shown.add_column("measure", min_width=14, overflow="fold")
    for column in content.columns[2:]:
        name = column.text.lower()
        shown.add_column(Text(name.replace(" ", "\n")), justify="right", min_width=min(9, len(name)))
    shown.add_column("verdict", no_wrap=True)
    for line in content.lines:
        shown.add_row(Text(line.title), *_cells(line))
    return shown


def _trust_list(audit: Audit) -> Text:
    """Return the trust table measure by measure, for a terminal too narrow for its columns: nothing is cut off."""
    content, lines = table(audit), []
    names = [column.text.lower() for column in content.columns[2:]]
    for line in content.lines:
        *numbers, verdict = _cells(line)
        parts = [Text.assemble(f"{name} ", number) for name, number in zip(names, numbers, strict=True)]
        lines.append(Text.assemble((line.title, "bold"), "  ", verdict, "\n  ", Text("; ").join(parts)))
    return Text("\n").join(lines)


def _cells(line: Line) -> list[Text]:
    _, *numbers = line.cells
    cells = []
    for cell in numbers:
        mark = f"{VERDICTS[cell.verdict].mark} " if cell.verdict else ""
        word = "DEFECT " if cell.verdict == "defect" else ""
        cells.append(Text(f"{mark}{word}{cell.text}{_footnotes(cell)}", style=_STYLES[cell.verdict]))
    verdict = VERDICTS[line.verdict]
    cells.append(Text(f"{verdict.mark} {verdict.word}", style=f"bold {_STYLES[line.verdict]}".strip()))
    return cells


def _key(audit: Audit) -> Text:
    moves = max((len(attack.folds) for row in audit.rows for attack in row.attacks), default=0)
    if moves:
        counted = "one random move" if moves == 1 else f"{moves} random moves"
        words = f"×: largest factor over {counted} that left the predictions unchanged. canonical: compare this one."
    else:
        words = "No symmetry, no test: the values stand as measured."
    marks = "".join(_footnotes(cell) for line in table(audit).lines for cell in line.cells)
    words += "".join(f" {mark}: {meaning}." for mark, meaning in _FOOTNOTES.items() if mark in marks)
    return Text(words, style="dim")


def _footnotes(cell: Cell) -> str:
    """Return the marks behind a number. A defect, which is declared invariant, has a word of its own."""
    survives_undeclared = cell.verdict == "survives" and cell.declared is False
    within_error = cell.verdict == "survives" and cell.declared is not None and cell.text != _UNCHANGED
    return ("≈" if within_error else "") + ("°" if survives_undeclared else "") + ("*" if cell.note else "")


def _printed(value: float | None, digits: int = 3) -> str:
    return typeset(number(value, digits))
