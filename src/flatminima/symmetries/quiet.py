"""Hold back what torch's tracer says while it works: it speaks of torch's internals, not of the user's model."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["quietly"]

# The process has one list of warning filters and one sys.stderr, so two threads must not overlap in changing them.
_LOCK = threading.Lock()


@contextmanager
def quietly() -> Iterator[None]:
    """Drop warnings, and this thread's log records of torch and lines to ``sys.stderr``; other threads' lines pass."""
    thread = threading.get_ident()

    def is_other_thread(record: logging.LogRecord) -> bool:
        return record.thread != thread

    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handlers = _torch_handlers()
        for handler in handlers:
            handler.addFilter(is_other_thread)
        stderr = sys.stderr
        sys.stderr = _OtherThreads(stderr, thread)  # torch.export prints the partial graph of a model that it cannot trace
        try:
            yield
        finally:
            sys.stderr = stderr
            for handler in handlers:
                handler.removeFilter(is_other_thread)


def _torch_handlers() -> set[logging.Handler]:
    loggers = [logging.getLogger(), *(v for k, v in logging.root.manager.loggerDict.items() if k.split(".")[0] == "torch")]
    return {handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers}


class _OtherThreads:
    """A stream that drops what one thread writes."""

    def __init__(self, stream: Any, thread: int) -> None:
        self._stream, self._thread = stream, thread

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
