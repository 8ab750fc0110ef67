"""When a number counts as moved."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatminima.trust.result import Reading
from flatminima.trust.verdict import attack, fold, minimum_verdict, overall


@given(old=st.floats(1e-6, 1e6), factor=st.floats(1.0, 1e6))
def test_fold_change_is_symmetric_and_at_least_one(old: float, factor: float) -> None:
    there, back = fold(old, old * factor), fold(old * factor, old)
    assert there == back
    assert there == pytest.approx(factor, rel=1e-9)
    assert fold(-old, -old * factor) == pytest.approx(factor, rel=1e-9)


@pytest.mark.parametrize(("old", "new"), [(1.0, -1.0), (0.0, 2.0), (2.0, 0.0), (1.0, math.inf)])
def test_a_change_of_sign_has_no_fold(old: float, new: float) -> None:
    assert fold(old, new) is None


def test_nothing_changed_is_a_fold_of_one_even_at_zero() -> None:
    assert fold(0.0, 0.0) == 1.0


@pytest.mark.parametrize(
    ("declared", "values", "stderr", "verdict"),
    [
        (True, (1.0, 1.0 + 5e-7), 0.0, "survives"),
        (True, (1.0, 1.0 + 5e-6), 0.0, "defect"),
        (False, (1.0, 30.0), 0.0, "moves"),
        (False, (1.0, 1.0), 0.0, "survives"),
        (True, (1.0, 1.3), 0.1, "survives"),
        (True, (1.0, 2.0), 0.1, "defect"),
        (True, (1.0, None), 0.0, "failed"),
    ],
)
def test_a_number_moved_if_it_changed_beyond_rounding_and_four_standard_errors(
    declared: bool, values: tuple[float | None, ...], stderr: float, verdict: str
) -> None:
    result = attack("permutation", declared, Reading(1.0, stderr), [Reading(v, stderr) for v in values], rtol=1e-6)
    assert result.verdict == verdict
    assert overall(Reading(1.0), [attack("layer", True, Reading(1.0), [Reading(1.0)], rtol=1e-6), result]) == verdict


def test_the_fold_of_an_attack_is_its_largest_and_unknown_where_one_is() -> None:
    assert attack("node", False, Reading(1.0), [Reading(2.0), Reading(0.1)], rtol=1e-6).fold == pytest.approx(10.0)
    assert attack("node", False, Reading(1.0), [Reading(2.0), Reading(-0.1)], rtol=1e-6).fold is None


@pytest.mark.parametrize(
    ("fall", "saddle_fall", "gained", "is_known", "verdict"),
    [
        (0.001, 0.0, 2.0, True, "minimum"),
        (0.001, 0.001, 2.0, True, "minimum"),
        (0.001, 0.5, 2.0, True, "saddle"),
        (0.1, 0.0, 2.0, True, "slope"),
        (0.1, 0.5, 2.0, True, "slope"),
        (0.1, 20.0, 2.0, True, "saddle"),  # 0.1 is little beside what lies down the other way
        (0.001, 0.0, 0.0, True, "slope"),
        (0.0, 0.0, 0.0, True, "minimum"),
        (0.0, 0.001, 0.0, True, "saddle"),
        (math.inf, 0.0, 2.0, True, "slope"),
        (0.001, 0.0, 2.0, False, "unknown"),
        (0.1, 0.0, 2.0, False, "slope"),
        (0.0, 0.5, 2.0, False, "unknown"),
    ],
)
def test_a_minimum_has_little_left_to_gain_and_no_way_down(
    fall: float, saddle_fall: float, gained: float, is_known: bool, verdict: str
) -> None:
    assert minimum_verdict(fall, saddle_fall, gained, is_known=is_known) == verdict


def test_noise_that_all_readings_share_excuses_no_change() -> None:
    assert attack("softmax shift", False, Reading(1.0, 0.3), [Reading(1.4, 0.3)], rtol=1e-6).verdict == "moves"
    assert attack("node", True, Reading(1.0, 0.3), [Reading(1.4, 0.3)], rtol=1e-6).verdict == "defect"
