"""How much memory is free, and the refusal of a dense matrix that does not fit into it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from flatminima._errors import NotSupported

__all__ = ["check_dense_fits", "free_bytes", "gib"]

_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be had on a device, or None where that is not known.

    On the CPU: what the system calls available, and no more than the process's control group allows.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    known = [n for n in (_available(), _left_in_group()) if n is not None]
    return min(known, default=None)


def check_dense_fits(size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a dense matrix of so many rows that is larger than the memory that is free.

    Raises:
        NotSupported: With the bytes, and what needs no dense matrix.
    """
    needed, free = size * size * dtype.itemsize, free_bytes(device)
    if free is not None and needed > free:
        raise NotSupported(
            f"A dense matrix of {size:,} rows takes {gib(needed)}, and {gib(free)} is free. Use what needs products alone: "
            "trace, diagonal, frobenius_norm, eigenpairs(k=…), spectral_density, logdet; or the block of fewer parameters."
        )


def gib(num_bytes: float) -> str:
    """Return a number of bytes in words."""
    return f"{num_bytes / 2**30:.3g} GiB" if num_bytes >= 2**30 / 100 else f"{num_bytes / 2**20:.3g} MiB"


def _available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):  # another system
        return None


def _left_in_group() -> int | None:
    for limit, usage in _LIMITS:
        try:
            most, used = ((Path("/sys/fs/cgroup") / name).read_text(encoding="ascii").strip() for name in (limit, usage))
            return None if most == "max" else max(int(most) - int(used), 0)
        except (OSError, ValueError):
            continue
    return None
