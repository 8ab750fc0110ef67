from __future__ import annotations

from dataclasses import replace

from flatminima.report.view import Cell, Line, flat_settings, parts, table
from tests import example_audits


def _line(title: str) -> Line:
    lines = [*table(example_audits.realistic()).lines, *table(example_audits.odd()).lines]
    return next(line for line in lines if line.title == title)


def _cell(line: Line, label: str) -> Cell:
    return next(cell for cell in line.cells if cell.label == label)


def test_every_line_has_a_cell_for_every_column() -> None:
    for audit in (example_audits.realistic(), example_audits.odd(), example_audits.without_symmetries()):
        content = table(audit)
        labels = [column.label for column in content.columns[1:]]
        assert all([cell.label for cell in line.cells] == labels for line in content.lines)


def test_every_cell_tells_what_it_means() -> None:
    for audit in (example_audits.realistic(), example_audits.odd()):
        assert all(cell.tip for line in table(audit).lines for cell in line.cells)


def test_a_value_shows_its_standard_error_only_if_it_has_one() -> None:
    assert _cell(_line("Hessian trace"), "Value").text == "214.0 ± 2.1"
    assert _cell(_line("Largest eigenvalue"), "Value").text == "31.42"


def test_the_tip_of_a_move_gives_the_readings_the_declaration_and_the_change() -> None:
    tip = _cell(_line("Hessian trace"), "node").tip
    assert tip.startswith("3 random moves along “node” gave ")
    assert "Declared to change." in tip
    assert tip.endswith("The largest change: ×19,000.")


def test_a_change_within_the_standard_error_is_called_that() -> None:
    audit = example_audits.realistic()
    row = audit.rows[4]
    noisy = replace(row.attacks[0], folds=(1.03,), verdict="survives")
    content = table(replace(audit, rows=(replace(row, attacks=(noisy,)),)))
    assert "within the standard error" in _cell(content.lines[0], "layer").tip


def test_a_missing_number_has_no_sort_key_and_an_unbounded_one_is_the_largest() -> None:
    assert _cell(_line("Failed"), "Value").key == ""
    assert _cell(_line("Not a number"), "Value").key == ""
    assert _cell(_line("Infinite"), "node").key == "Infinity"
    assert _cell(_line("Sign changes"), "layer").key == "Infinity"


def test_a_value_that_did_not_converge_says_so() -> None:
    audit = example_audits.realistic()
    row = audit.rows[0]
    content = table(replace(audit, rows=(replace(row, base=replace(row.base, converged=False)),)))
    cell = _cell(content.lines[0], "Value")
    assert cell.note == "not converged"
    assert "was not met" in cell.tip


def test_two_rows_of_one_title_are_told_apart_by_their_settings() -> None:
    audit = example_audits.realistic()
    row = audit.rows[3]
    twice = (replace(row, name="EpsilonSharpness(radius=0.1)"), replace(row, name="EpsilonSharpness(radius=0.01)"))
    titles = [line.title for line in table(replace(audit, rows=twice)).lines]
    assert titles == ["EpsilonSharpness(radius=0.1)", "EpsilonSharpness(radius=0.01)"]


def test_parts_are_shares_of_slope_and_curvature() -> None:
    first, second = parts(example_audits.realistic())
    assert first.title == "ε-sharpness (ε=0.01)"
    assert abs(first.first_share - 100 * 9.1e-5 / (9.1e-5 + 1.57e-3)) < 1e-9
    assert first.first_share + first.second_share == 100
    assert (second.first_share, second.second_share) == (0.0, 100.0)


def test_nested_settings_become_lines() -> None:
    settings = {"num_moves": 3, "versions": {"torch": "2.13"}, "measures": [], "data": None, "list": [1, {"a": "é"}]}
    assert flat_settings(settings) == [
        ("num moves", ["3"]),
        ("versions", ["torch: 2.13"]),
        ("measures", ["none"]),
        ("data", ["none"]),
        ("list", ["1", '{"a": "é"}']),
    ]
