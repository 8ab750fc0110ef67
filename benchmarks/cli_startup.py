"""Time ``flatminima --help`` beside an interpreter that does nothing.

Run: python benchmarks/cli_startup.py [--repeats 20]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path


def seconds(command: list[str]) -> float:
    """Return the wall time of one run of the command, from its start to its end."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="runs of each command, at least 2 (default 20)")
    repeats = parser.parse_args().repeats
    if repeats < 2:
        parser.error("--repeats must be at least 2")
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "flatminima --help": [str(Path(sys.executable).parent / "flatminima"), "--help"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for command in commands.values():  # fills the caches; not counted
        seconds(command)
    for _ in range(repeats):
        for name, command in commands.items():
            times[name].append(seconds(command))
    print(f"{'command':<20} {'median':>8} {'10 %':>8} {'90 %':>8}   seconds, {repeats} runs each, in turn")
    for name, values in times.items():
        deciles = statistics.quantiles(values, n=10, method="inclusive")
        print(f"{name:<20} {statistics.median(values):8.3f} {deciles[0]:8.3f} {deciles[-1]:8.3f}")


if __name__ == "__main__":
    main()
