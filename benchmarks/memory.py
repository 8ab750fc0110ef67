"""Peak resident memory of a piece of code, beyond what the process held before."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from pathlib import Path

import torch.fx.experimental.symbolic_shapes  # noqa: F401  (torch loads it, with SymPy, 30 MB, at the first vector-Jacobian product)

__all__ = ["METHOD", "PeakMeter", "resident"]

_PROC = Path("/proc/self")


def _can_reset() -> bool:
    try:
        (_PROC / "clear_refs").write_text("5")  # sets the kernel's high-water mark back to the present
    except OSError:
        return False
    return "VmHWM" in (_PROC / "status").read_text()


_RESETS = _can_reset()
METHOD = (
    "the kernel's high-water mark of resident memory, set back before"
    if _RESETS
    else "getrusage's high-water mark of resident memory, less its value before (too low where start-up took more)"
)


class PeakMeter:
    """Resident bytes at the highest point since this was made, beyond those at that time."""

    def __init__(self) -> None:
        gc.collect()
        _give_back()
        if _RESETS:
            (_PROC / "clear_refs").write_text("5")
        self._before = resident() if _RESETS else _high_water()

    def bytes(self) -> int:
        return max(0, _high_water() - self._before)


def resident() -> int:
    """Return the resident bytes of this process now (on other systems than Linux the highest so far)."""
    return _status("VmRSS") if _RESETS else _high_water()


def _high_water() -> int:
    if _RESETS:
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(field: str) -> int:
    line = next(line for line in (_PROC / "status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _give_back() -> None:
    """Return freed memory to the system, so that what is used anew is seen."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return
