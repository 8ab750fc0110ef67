from __future__ import annotations

from dataclasses import replace
from typing import Any

from flatminima.report.words import VERDICTS, Finding, cost_of, findings, headline, outputs_agree, verdict_of
from flatminima.trust import Audit, Reading
from tests import example_audits


def _finding(audit: Audit, title: str) -> Finding:
    (found,) = [finding for finding in findings(audit) if finding.title == title]
    return found


def test_the_headline_counts_what_survives() -> None:
    audit = example_audits.realistic()
    survivors = tuple(row for row in audit.rows if row.verdict == "survives")
    movers = tuple(row for row in audit.rows if row.verdict == "moves")
    assert headline(audit) == "5 of 11 numbers survive."
    assert headline(replace(audit, rows=survivors[:1] + movers)) == "1 of 7 numbers survives."
    assert headline(replace(audit, rows=survivors)) == "All 5 numbers survive."
    assert headline(replace(audit, rows=survivors[:1])) == "The number survives."
    assert headline(replace(audit, rows=movers)) == "None of the 6 numbers survives."
    assert headline(replace(audit, rows=movers[:1])) == "The number does not survive."
    assert headline(example_audits.empty()) == "Nothing was measured yet."


def test_a_number_that_nobody_pushed_has_not_survived() -> None:
    audit = example_audits.without_symmetries()
    assert {verdict_of(row) for row in audit.rows} == {"untested"}
    assert "untested" in headline(audit)
    assert [finding.title for finding in findings(audit)] == ["Is this a minimum?", "Not tested"]


def test_what_moves_is_named_with_its_largest_factor_and_what_moved_it() -> None:
    moved = _finding(example_audits.realistic(), "Do not compare between networks")
    assert ("Hessian trace", "×19,000 by node rescaling") in moved.items
    assert len(moved.items) == 6


def test_defects_and_failures_are_named_with_the_reason() -> None:
    audit = example_audits.odd()
    assert _finding(audit, "Do not use").items == (("Defective", "×4 by node rescaling"),)
    ((name, reason),) = _finding(audit, "No value").items
    assert name == "Failed"
    assert "third derivative" in reason


def test_every_row_is_in_one_finding() -> None:
    for audit in (example_audits.realistic(), example_audits.odd(), example_audits.without_symmetries()):
        assert sum(len(finding.items) for finding in findings(audit)) == len(audit.rows)


def _at(**check: Any) -> Audit:
    audit = example_audits.realistic()
    assert audit.minimum is not None
    return replace(audit, minimum=replace(audit.minimum, **check))


def test_an_unfinished_training_limits_what_may_be_compared() -> None:
    unfinished = _at(loss=1.1, reference_loss=2.3, expected_fall=0.8, verdict="slope")
    point = _finding(unfinished, "Is this a minimum?")
    assert point.tone == "bad"
    assert point.text == (
        "Training is unfinished: to second order a step would lower the loss of 1.10 by 0.800 or more, 40% of all that it "
        "can gain over outputs that ignore the inputs (loss 2.30)."
    )
    for audit in (unfinished, _at(verdict="saddle")):
        assert _finding(audit, "Unchanged, but not at a minimum").tone == "care"
        assert "May be compared between networks" not in [finding.title for finding in findings(audit)]


def test_what_is_left_to_gain_is_said_with_the_curvature() -> None:
    at = {"loss": 1.1, "reference_loss": 2.3, "smallest_eigenvalue": -0.5, "largest_eigenvalue": 5.0}
    saddle = _finding(_at(**at, verdict="saddle", saddle_fall=0.8), "Is this a minimum?")
    assert "is −0.500, beside a largest of 5.00), and along such a direction it falls by 0.800, 40% of all that" in saddle.text
    assert saddle.tone == "plain"
    minimum = _finding(_at(smallest_eigenvalue=-1e-9, noise=1e-8, verdict="minimum"), "Is this a minimum?")
    assert "what training can still gain, 0.00193, is less than 0.1% of all that it can gain" in minimum.text
    assert "No curvature is negative beyond rounding: to second order a minimum, flat directions aside." in minimum.text
    exact = _finding(_at(expected_fall=0.0, verdict="minimum"), "Is this a minimum?")
    assert "what training can still gain is less than its rounding" in exact.text
    nearly = _finding(_at(smallest_eigenvalue=-1e-3, noise=1e-8, verdict="minimum"), "Is this a minimum?")
    assert "A minimum for practical purposes; the most negative curvature is −0.00100" in nearly.text
    unknown = _at(loss=2.0, reference_loss=None, expected_fall=0.001, verdict="minimum")
    assert "less than 0.1% of the loss." in _finding(unknown, "Is this a minimum?").text


def test_where_it_cannot_be_told_whether_this_is_a_minimum_the_reason_is_said() -> None:
    audit = _at(verdict="unknown", expected_fall=0.0)
    point = _finding(audit, "Is this a minimum?")
    assert point.text.startswith("That cannot be told. The loss of 0.00193 still slopes")
    assert "linear in the outputs, as absolute errors are" in point.text
    assert point.tone == "care"
    assert "if you know that training has ended" in _finding(audit, "Unchanged, if at a minimum").text


def test_symmetries_that_are_not_covered_qualify_what_survives() -> None:
    audit = replace(example_audits.realistic(), notes=("Not covered: residual sums.",))
    assert "named in the notes" in _finding(audit, "May be compared between networks").text


def test_the_largest_difference_of_the_outputs_is_given_unless_one_is_unknown() -> None:
    assert outputs_agree(example_audits.realistic()) == "8.9×10⁻¹⁵"
    assert outputs_agree(example_audits.odd()) == "an unknown amount"


def test_costs_are_counted_in_words() -> None:
    assert cost_of(Reading(1.0, num_products=1, num_losses=1200, seconds=0.04)) == "1 product, 1,200 forward passes, 0.0 s"


def test_every_verdict_has_a_mark_of_its_own() -> None:
    assert len({verdict.mark for verdict in VERDICTS.values()}) == len(VERDICTS)
