"""Numbers as text, the same in plots, pages and the terminal."""

from __future__ import annotations

import math
from decimal import Decimal

__all__ = ["fold", "number", "typeset", "with_error"]

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MOST_DIGITS = 6
_ROUNDING = 1e-10  # a relative standard error below this is rounding, and the value is exact


def number(value: float | None, digits: int = 3) -> str:
    """Return the value to so many significant digits, or "–" where there is none.

    Example:
        >>> number(0.0012345), number(123456.7), number(-1.5e-9), number(None)
        ('0.00123', '123,457', '-1.50e-9', '–')
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    exponent = _exponent(value, digits)
    if value == 0:
        return "0"
    if -4 < exponent < 6:
        return f"{value:,.{max(0, digits - 1 - exponent)}f}"
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa}e{int(power)}"


def with_error(value: float | None, stderr: float | None, digits: int = 4) -> str:
    """Return the value with its standard error, the error to two digits and the value to the same place.

    An exact value, or one whose error is rounding, stands alone.

    Example:
        >>> with_error(214.3, 2.14), with_error(1.2344e-7, 1.2e-9), with_error(3.0, 0.0)
        ('214.3 ± 2.1', '(1.234 ± 0.012)e-7', '3.000')
    """
    if value is None or stderr is None or not math.isfinite(value) or not math.isfinite(stderr):
        return number(value, digits)
    if stderr <= _ROUNDING * abs(value):
        return number(value, digits)
    exponent, place = _exponent(max(abs(value), stderr), digits), 1 - _exponent(stderr, 2)
    if exponent + place >= _MOST_DIGITS:
        return f"{number(value, exponent + place)} ± {number(stderr, 2)}"  # never rounded further than its error
    if -4 < exponent < 6:
        return f"{value:,.{max(0, place)}f} ± {stderr:,.{max(0, place)}f}"
    place = max(0, exponent + place)
    mantissa, error = (Decimal(x).scaleb(-exponent) for x in (value, stderr))  # 10.0 ** 310 would overflow
    return f"({mantissa:.{place}f} ± {error:.{place}f})e{exponent}"


def fold(value: float | None) -> str:
    """Return a fold change as a factor.

    Example:
        >>> fold(1.0 + 1e-12), fold(18.234), fold(123456.0), fold(None)
        ('×1', '×18.2', '×123,456', '–')
    """
    if value is None or math.isnan(value):
        return "–"
    return f"×{value:.3g}" if value < 1000 else f"×{number(value)}"


def typeset(text: str) -> str:
    """Return a number's text with printed minus signs and powers of ten.

    Example:
        >>> typeset("(-1.20 ± 0.02)e-7")
        '(−1.20 ± 0.02)×10⁻⁷'
    """
    head, separator, power = text.replace("-", "−").rpartition("e")
    power = power.replace("−", "-")
    if not separator or not power.lstrip("-").isdigit():
        return text.replace("-", "−")
    return f"{head}×10{power.translate(_SUPERSCRIPT)}"


def _exponent(value: float, digits: int) -> int:
    """Return the decimal exponent after rounding to so many digits."""
    return int(f"{abs(value):.{digits - 1}e}".partition("e")[2]) if value else 0
