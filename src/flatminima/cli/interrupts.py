"""What Ctrl-C does: one interruption at a time, and never in the middle of something that must end whole."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["ignore", "one_at_a_time", "put_off"]

#: A key that is pressed again within so many seconds is the same wish: the report of the first press is being written.
_IMPATIENCE = 2.0


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, but not again while the first one is being answered."""
    last = float("-inf")

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > _IMPATIENCE:
            raise KeyboardInterrupt

    with _answered_by(interrupt):
        yield


@contextmanager
def put_off() -> Iterator[list[int]]:
    """Hold Ctrl-C off inside the block, and return a list that has an entry for each one that came."""
    came: list[int] = []
    with _answered_by(lambda number, _frame: came.append(number)):
        yield came


def ignore() -> None:
    """Ignore Ctrl-C for the rest of the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _answered_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Set the handler of SIGINT, unless it is ignored (as for a script's command in the background) or we are in a thread."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
