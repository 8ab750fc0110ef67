"""How the library reports progress without printing: it calls a function that the caller supplies."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Progress", "no_progress"]


class Progress(Protocol):
    """Called as ``progress(done, total, message)``; ``total`` is None where the end is not known beforehand.

    Raising from it (``KeyboardInterrupt`` included) stops the work; the library restores everything of the user's.
    """

    def __call__(self, done: int, total: int | None, message: str) -> None: ...


def no_progress(done: int, total: int | None, message: str) -> None:
    """Report nothing."""
