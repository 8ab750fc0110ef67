"""Time the audit of ``digits-mlp`` from the command line, training included, and its peak memory.

Run: python benchmarks/audit_digits.py [--repeats 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def one_run(folder: str) -> tuple[float, float, float]:
    """Return wall seconds, CPU seconds and peak resident megabytes of one audit."""
    command = [str(Path(sys.executable).parent / "flatminima"), "audit", "digits-mlp", "--quiet", "--out", folder]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the audit ended with status {os.waitstatus_to_exitcode(status)}")
    kilobytes = usage.ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, kilobytes / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs, at least 1 (default 3)")
    repeats = parser.parse_args().repeats
    if repeats < 1:
        parser.error("--repeats must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        runs = [one_run(folder) for _ in range(repeats)]
    wall, cpu, memory = (statistics.median(values) for values in zip(*runs, strict=True))
    print(f"flatminima audit digits-mlp, median of {repeats}: {wall:.1f} s wall, {cpu:.1f} s CPU, {memory:.0f} MiB at most")


if __name__ == "__main__":
    main()
