"""What an estimate says of its error."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import t

from flatminima.estimators import Estimate

D64 = torch.float64


def _estimate(value: float, stderr: float, **settings: object) -> Estimate:
    dtype = settings.pop("dtype", D64)
    assert isinstance(dtype, torch.dtype)
    return Estimate(torch.tensor(value, dtype=dtype), torch.tensor(stderr, dtype=dtype), **settings)  # type: ignore[arg-type]


def test_an_exact_value_is_its_own_interval() -> None:
    assert Estimate.exact(torch.tensor(3.0)).interval() == (3.0, 3.0)


def test_one_sample_bounds_nothing() -> None:
    assert _estimate(3.0, 0.0, num_samples=1).interval() == (-math.inf, math.inf)


def test_without_skewness_the_interval_is_students() -> None:
    half = 0.5 * t.ppf(0.95, 9)
    for skewness in (None, torch.tensor(0.0, dtype=D64)):
        low, high = _estimate(3.0, 0.5, num_samples=10, skewness=skewness).interval(0.9)
        assert (float(low), float(high)) == pytest.approx((3 - half, 3 + half))


@pytest.mark.parametrize("skewness", [2.8, -2.8])
def test_skewed_samples_widen_the_interval_on_the_side_of_their_tail_only(skewness: float) -> None:
    half = 0.5 * float(t.ppf(0.975, 29))
    low, high = _estimate(3.0, 0.5, num_samples=30, skewness=torch.tensor(skewness, dtype=D64)).interval()
    a = abs(skewness) / (3 * 30**0.5)
    q = float(t.ppf(0.975, 29))
    far = 0.5 * (1 - math.copysign(abs(1 + 3 * a * (-q - a / 2)) ** (1 / 3), 1 + 3 * a * (-q - a / 2))) / a
    assert far > half
    expected = (3 - half, 3 + far) if skewness > 0 else (3 - far, 3 + half)
    assert (float(low), float(high)) == pytest.approx(expected)


@pytest.mark.parametrize("value", [2.3e23, 2.3e-24])
def test_the_interval_of_a_root_stays_in_range_in_float32(value: float) -> None:
    estimate = _estimate(value, 0.05 * value, num_samples=30, power=0.5, dtype=torch.float32)
    low, high = estimate.interval()
    assert 0.8 * value < float(low) < value < float(high) < 1.2 * value


def test_the_interval_of_a_root_is_the_root_of_the_squares_interval() -> None:
    square = _estimate(9.0, 0.6, num_samples=20, skewness=torch.tensor(1.0, dtype=D64))
    root = _estimate(3.0, 0.1, num_samples=20, skewness=torch.tensor(1.0, dtype=D64), power=0.5)
    for end, squared in zip(root.interval(), square.interval(), strict=True):
        assert float(end) ** 2 == pytest.approx(float(squared))


def test_a_level_that_is_no_probability_is_refused() -> None:
    with pytest.raises(ValueError, match="must be between 0 and 1"):
        _estimate(1.0, 0.1, num_samples=5).interval(95)
