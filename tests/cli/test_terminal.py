from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flatminima.cli import terminal
from flatminima.trust import Audit
from tests import example_audits


def _printed(audit: Audit, monkeypatch: pytest.MonkeyPatch, width: int = 120) -> str:
    buffer = io.StringIO()
    monkeypatch.setattr(terminal, "_console", lambda: Console(file=buffer, width=width, highlight=False))
    terminal.print_audit(audit, [Path("report/report.html"), Path("report/report.json")])
    return buffer.getvalue()


def test_the_table_has_value_error_folds_canonical_value_and_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _printed(example_audits.realistic(), monkeypatch).splitlines()
    (trace,) = [" ".join(line.split()) for line in lines if line.startswith(" Hessian trace")]
    assert trace == "Hessian trace 214.0 ± 2.1 ↕ ×33.1 ↕ ×19,000 ✓ ×1 ✓ ×1 66.34 ± 0.65 ↕ moves"


def test_what_was_audited_stands_above_and_what_it_took_below(monkeypatch: pytest.MonkeyPatch) -> None:
    text = _printed(example_audits.realistic(), monkeypatch)
    assert text.index("digits-mlp: 3,466 parameters, 1,347 examples") < text.index("Minimum?") < text.index("Hessian trace")
    assert "λ_min −0.00310" in text
    assert "along node (dimension 64), 3 moves, outputs agree to 8.9×10⁻¹⁵" in text
    assert text.index("Hessian trace") < text.index("5 of 11 numbers survive.") < text.index("curvature products")
    assert "Written: report/report.html, report/report.json" in text


def test_a_defect_is_told_in_words_not_only_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    text = _printed(example_audits.odd(), monkeypatch, width=160)
    assert "DEFECT ×4" in text
    assert "changes sign" in text


def test_footnotes_tell_undeclared_survivals_and_bounds_that_had_not_converged(monkeypatch: pytest.MonkeyPatch) -> None:
    audit = example_audits.realistic()
    assert "declared invariant" not in _printed(audit, monkeypatch)
    assert "≈" not in _printed(audit, monkeypatch)
    trace = audit.rows[1]
    survives = replace(trace.attacks[0], verdict="survives", declared_invariant=False, folds=(1.0, 1.0, 1.0))
    row = replace(trace, base=replace(trace.base, converged=False), attacks=(survives,), verdict="survives")
    text = _printed(replace(audit, rows=(row,)), monkeypatch)
    assert "214.0 ± 2.1*" in text
    assert "✓ ×1°" in text
    by_chance = replace(survives, declared_invariant=True, folds=(1.2, 1.1, 1.0))
    noisy = _printed(replace(audit, rows=(replace(row, attacks=(by_chance,)),)), monkeypatch)
    assert "✓ ×1.2≈" in noisy
    assert "≈: a change within the standard errors." in " ".join(noisy.split())
    assert "°: unchanged here, though the measure is not declared invariant. *: not converged." in " ".join(text.split())


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("name", ["realistic", "odd", "empty", "without_symmetries"])
def test_any_audit_is_printed_at_any_width(monkeypatch: pytest.MonkeyPatch, name: str, width: int) -> None:
    text = _printed(getattr(example_audits, name)(), monkeypatch, width)
    assert "Written:" in text


def test_names_are_not_read_as_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "[bold]" in _printed(example_audits.odd(), monkeypatch, width=400)


def test_progress_is_silent_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with terminal.progress_bar(hidden=False) as progress:
        progress(1, 2, "half [bold]")
    assert capfd.readouterr() == ("", "")


def test_progress_shows_the_stage_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.StringIO()
    monkeypatch.setattr(terminal, "Console", lambda **_: Console(file=buffer, force_terminal=True, width=120))
    with terminal.progress_bar(hidden=False) as progress:
        for done in range(3):
            progress(done, 2, "training [bold]")
        progress(0, None, "measuring")
        progress(1, 4, "measuring")
    assert "training [bold]" in buffer.getvalue()
    assert "measuring" in buffer.getvalue()
    assert "left" in buffer.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 130])
def test_every_verdict_and_number_is_whole_at_every_width(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    audit = example_audits.realistic()
    text = _printed(audit, monkeypatch, width)
    verdicts = [row.verdict for row in audit.rows]
    for verdict in ("survives", "moves"):
        assert text.count(verdict) >= verdicts.count(verdict) > 0
    assert "…" not in text
