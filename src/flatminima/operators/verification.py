"""Verification: what the self-check of an objective's products compared, and how it came out."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import Any, final

import torch

__all__ = ["Check", "Verdict", "Verification"]

#: What a check says. Where torch has no second derivative, or a wrong one, the product is "refused": nothing wrong is returned.
Verdict = str
AGREES, DIFFERS, REFUSED, NOT_APPLICABLE = "agrees", "differs", "refused", "does not apply"

_WIDTH = 120


@final
@dataclass(frozen=True)
class Check:
    """One comparison of two ways to the same number or vector.

    Attributes:
        name: What is checked.
        compared: The two ways, in words.
        left: The first number, or the norm of the first vector.
        right: The second number, or the norm of the second vector.
        difference: Size of the difference, relative to the larger of the two.
        tolerance: What it may be.
        verdict: "agrees", "differs", "refused" (the library raises instead of answering) or "does not apply".
        advice: What to do where it does not agree, or why it is refused or does not apply.
    """

    name: str
    compared: str
    left: float = math.nan
    right: float = math.nan
    difference: float = math.nan
    tolerance: float = math.nan
    verdict: Verdict = AGREES
    advice: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong: it agrees, or does not apply."""
        return self.verdict in (AGREES, NOT_APPLICABLE)


@final
@dataclass(frozen=True)
class Verification:
    """The checks of one objective's derivatives and products; ``print`` shows them as a table.

    Attributes:
        checks: In the order in which they were made.
        num_parameters: n.
        num_examples: Examples that the loss was taken over.
        dtype: What derivatives were compared in: float64 where the model can.
    """

    checks: tuple[Check, ...]
    num_parameters: int
    num_examples: int
    dtype: torch.dtype

    @property
    def ok(self) -> bool:
        """Whether no check differs and no product is refused."""
        return all(check.ok for check in self.checks)

    def __bool__(self) -> bool:
        return self.ok

    def __getitem__(self, name: str) -> Check:
        """Return the check of this name."""
        found = {check.name: check for check in self.checks}
        if name not in found:
            raise KeyError(f"There is no check {name!r}. There are {', '.join(found)}.")
        return found[name]

    def __str__(self) -> str:
        rows = [("check", "compared", "", "", "difference", "allowed", "verdict")]
        rows += [
            (c.name, c.compared, _short(c.left), _short(c.right), _short(c.difference, 2), _short(c.tolerance, 2), c.verdict)
            for c in self.checks
        ]
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "─" * max(len(line) for line in lines))
        said: dict[str, list[Check]] = {}
        for check in self.checks:
            if check.advice and check.verdict != AGREES:
                said.setdefault(f"{check.verdict}: {check.advice}", []).append(check)
        for words, checks in said.items():
            names = ", ".join(check.name for check in checks)
            lines += textwrap.wrap(f"{names} {words}", _WIDTH, subsequent_indent="  ")
        wrong = [check.name for check in self.checks if not check.ok]
        what = f"{self.num_parameters:,} parameters, {self.num_examples:,} examples, {_dtype(self.dtype)}"
        lines.append(f"{'All checks agree' if not wrong else 'Not verified: ' + ', '.join(wrong)} ({what}).")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values, ready for JSON; numbers that were not computed are None."""
        return {
            "ok": self.ok,
            "num_parameters": self.num_parameters,
            "num_examples": self.num_examples,
            "dtype": _dtype(self.dtype),
            "checks": [{name: _plain(value) for name, value in vars(check).items()} for check in self.checks],
        }


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: float, digits: int = 6) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}g}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
