"""The nearest known name to a misspelt one. Without torch, so that the command answers at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(name: str, options: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the closest option, or nothing when none is close."""
    lowered = {option.lower(): option for option in options}
    match = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
    return f" Did you mean {lowered[match[0]]!r}?" if match else ""
