from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatminima.estimators import Estimate, eigenvalue_bracket, frobenius_norm, trace
from flatminima.operators import as_operator
from tests.estimators.spectra import indefinite, rng, rotated


def uncertain(value: float, stderr: float) -> Estimate:
    return Estimate(torch.tensor(value, dtype=torch.float64), torch.tensor(stderr, dtype=torch.float64), num_samples=30)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=1, max_size=20))
def test_the_bracket_holds_the_ends_of_every_spectrum(values: list[float]) -> None:
    d = torch.tensor(values, dtype=torch.float64)
    bracket = eigenvalue_bracket(float(d.sum()), float(d.norm()), len(values))
    assert bracket.allows(largest=max(values), smallest=min(values), num_stderr=0) or d.std(correction=0) < 1e-5 * d.abs().max()


@pytest.mark.parametrize("n", [2, 3, 10])
def test_the_bounds_are_reached(n: int) -> None:
    # one eigenvalue apart: the upper bound of λ_max; one below the rest: the lower one
    apart = torch.cat([torch.ones(1), torch.zeros(n - 1)]).double()
    low, high = eigenvalue_bracket(float(apart.sum()), float(apart.norm()), n).largest
    assert float(high) == pytest.approx(1)
    below = 1 - apart
    low, _ = eigenvalue_bracket(float(below.sum()), float(below.norm()), n).largest
    assert float(low) == pytest.approx(1)
    assert float(eigenvalue_bracket(float(below.sum()), float(below.norm()), n).smallest[0]) == pytest.approx(0, abs=1e-9)


def test_two_eigenvalues_follow_exactly() -> None:
    bracket = eigenvalue_bracket(2.0, 10.0**0.5, 2)  # of −1 and 3
    assert [float(end) for end in (*bracket.largest, *bracket.smallest)] == pytest.approx([3, 3, -1, -1])


def test_one_row_and_the_zero_matrix_have_no_width() -> None:
    assert [float(end) for end in eigenvalue_bracket(-7.0, 7.0, 1).largest] == [-7, -7]
    assert [float(end) for end in eigenvalue_bracket(0.0, 0.0, 5).smallest] == [0, 0]


def test_standard_errors_are_those_of_finite_differences() -> None:
    t, f, n = 6.0, 7.0, 20
    h = 1e-6
    for end in range(4):

        def bound(t: float, f: float, end: int = end) -> float:
            bracket = eigenvalue_bracket(t, f, n)
            return float((*bracket.largest, *bracket.smallest)[end])

        by_trace = abs(bound(t + h, f) - bound(t - h, f)) / (2 * h)
        by_norm = abs(bound(t, f + h) - bound(t, f - h)) / (2 * h)
        bracket = eigenvalue_bracket(uncertain(t, 0.01), uncertain(f, 0.02), n)
        stderr = float((*bracket.largest, *bracket.smallest)[end].stderr)
        assert stderr == pytest.approx(0.01 * by_trace + 0.02 * by_norm, rel=1e-4)


def test_sampled_trace_and_norm_make_bounds_that_hold() -> None:
    values = indefinite()
    A = as_operator(rotated(values))
    for seed in range(50):
        generator = rng(seed)
        t = trace(A, method="hutchinson", num_products=20, generator=generator)
        f = frobenius_norm(A, method="hutchinson", num_products=20, generator=generator)
        bracket = eigenvalue_bracket(t, f, 60)
        assert bracket.allows(largest=float(values.max()), smallest=float(values.min()))
        assert not bracket.allows(largest=100.0)
        assert float(bracket.largest[1].stderr) > 0


def test_a_spectrum_of_one_value_within_the_errors_is_known_to_their_root() -> None:
    bracket = eigenvalue_bracket(uncertain(10.0, 0.1), uncertain(10**0.5, 0.01), 10)
    assert float(bracket.largest[1]) == pytest.approx(1)
    assert 0.1 < float(bracket.largest[1].stderr) < 3
    assert json.loads(json.dumps(bracket.to_dict()))["largest"][1]["value"] == pytest.approx(1)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="`n` must be at least 1"):
        eigenvalue_bracket(1.0, 1.0, 0)
    with pytest.raises(ValueError, match="`trace` must be at most √n times `frobenius`"):
        eigenvalue_bracket(10.0, 1.0, 4)
    with pytest.raises(ValueError, match="`frobenius` must be a finite number of at least 0"):
        eigenvalue_bracket(1.0, -1.0, 4)
    with pytest.raises(ValueError, match="`trace` must be finite"):
        eigenvalue_bracket(float("nan"), 1.0, 4)
    with pytest.raises(TypeError, match="`trace` must be an Estimate or a number"):
        eigenvalue_bracket("1", 1.0, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`trace` must be one number. Got an estimate of shape \(2,\)"):
        eigenvalue_bracket(Estimate.exact(torch.ones(2)), 1.0, 4)
