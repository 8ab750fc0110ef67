from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flatminima.plots.labels import fold_label, titles
from flatminima.plots.numbers import fold, number, typeset, with_error
from flatminima.trust import Attack, Reading
from tests import example_audits


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (1.0, "1.00"), (0.00123456, "0.00123"), (1234567.0, "1.23e6"), (99999.6, "100,000"), (-0.5, "-0.500"),
        (1.5e-9, "1.50e-9"), (9.999e-5, "1.00e-4"), (math.inf, "∞"), (-math.inf, "-∞"), (math.nan, "–"), (None, "–"),
        (1e300, "1.00e300"),
    ],
)  # fmt: skip
def test_numbers_keep_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "stderr", "text"),
    [
        (214.3, 2.14, "214.3 ± 2.1"),
        (214.3, 99.6, "214 ± 100"),
        (3.0, 0.0, "3.000"),
        (3.0, 1e-15, "3.000"),
        (0.0, 0.1, "0.00 ± 0.10"),
        (1e-7, 2e-7, "(1.0 ± 2.0)e-7"),
        (1234.5, 1e-6, "1,234.500000 ± 1.0e-6"),
        (12345.0, 4000.0, "12,345 ± 4,000"),
        (1.0, math.inf, "1.000"),
        (None, 0.1, "–"),
        (1.5e-310, 1e-311, "(1.50 ± 0.10)e-310"),
    ],
)
def test_a_standard_error_has_two_digits_and_the_value_the_same_place(value: float | None, stderr: float, text: str) -> None:
    assert with_error(value, stderr) == text


@given(st.floats(min_value=-1e308, max_value=1e308))
def test_a_number_reads_back_within_its_digits(value: float) -> None:
    assert float(number(value, 4).replace(",", "")) == pytest.approx(value, rel=6e-4, abs=1e-320)


@given(st.floats(min_value=-1e12, max_value=1e12), st.floats(min_value=1e-9, max_value=1e12))
@example(1450022.0, 1.0)
def test_a_value_with_its_error_reads_back_within_the_error(value: float, stderr: float) -> None:
    text = with_error(value, stderr).replace(",", "")
    if "±" in text and not text.startswith("("):
        shown, error = (float(part) for part in text.split(" ± "))
        assert abs(shown - value) <= stderr
        assert error == pytest.approx(stderr, rel=0.06)


@given(st.floats(min_value=1.0))
def test_a_fold_is_a_factor(value: float) -> None:
    assert fold(value).startswith("×")


def test_typeset_prints_minus_signs_and_powers_and_leaves_words_alone() -> None:
    assert typeset("-1.5e-12") == "−1.5×10⁻¹²"
    assert typeset("changes sign") == "changes sign"
    assert typeset("no value") == "no value"
    assert typeset("214.0 ± 2.1") == "214.0 ± 2.1"


@pytest.mark.parametrize(
    ("base", "readings", "label"),
    [
        (1.0, (2.0, -2.0), "changes sign"),
        (0.0, (2.0, 3.0), "to or from 0"),
        (1.0, (2.0, None), "no value"),
        (1.0, (2.0, math.inf), "×∞"),
        (1.0, (math.nan, 2.0), "no value"),
    ],
)
def test_a_missing_factor_says_why(base: float, readings: tuple[float | None, ...], label: str) -> None:
    attack = Attack("node", False, tuple(Reading(value) for value in readings), (2.0, None), "moves")
    assert fold_label(Reading(base), attack) == label


def test_titles_are_those_of_the_measures() -> None:
    assert titles(example_audits.realistic().rows)[1] == "Hessian trace"
