"""The exceptions that are not plain argument errors.

A wrong argument raises ``ValueError`` or ``TypeError``. What can go wrong with right arguments has a name here,
so that a caller can tell a loader that shuffles from a loss that overflows.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "FlatminimaError",
    "NonFiniteLoss",
    "NotDeterministic",
    "NotEquivalent",
    "NotSupported",
    "first_line",
]


class FlatminimaError(Exception):
    """Base of every exception that flatminima names itself."""


class NotDeterministic(FlatminimaError):
    """Two passes over the same data gave two losses, so no derivative of "the" loss exists."""


class NonFiniteLoss(FlatminimaError):
    """The loss of some batch is infinite or not a number."""


class NotEquivalent(FlatminimaError):
    """A move that should leave the network's function unchanged did change it."""


class NotSupported(FlatminimaError):
    """The quantity is well defined, but not computable for this model, loss or operator."""


class CheckpointError(FlatminimaError):
    """A checkpoint could not be read, or does not fit the model."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
