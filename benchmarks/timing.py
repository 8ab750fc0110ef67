"""Times taken in turn: a, b, a, b, …"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.works import Job

__all__ = ["CLOCKS", "Timed", "in_turn", "summary"]

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass
class Timed:
    """Seconds of the counted rounds; the first round's result; what went wrong, if anything did."""

    seconds: list[float] = field(default_factory=list)
    result: Any = None
    failure: str = ""


def in_turn(
    factories: Mapping[str, Callable[[], Job]],
    *,
    clock: Callable[[], float],
    most_rounds: int,
    budget: float,
    is_fresh: bool = False,
) -> dict[str, Timed]:
    """Run every participant once a round; the first round fills the caches and counts only where time is short.

    Args:
        factories: By participant; each prepares and returns what is measured.
        clock: Seconds.
        most_rounds: Counted rounds, if ``budget`` allows.
        budget: Seconds for the counted rounds; a first round of less than half of that is not counted.
        is_fresh: Whether to prepare anew in every round.
    """
    timed = {name: Timed() for name in factories}
    jobs: dict[str, Job] = {}

    def one(name: str) -> None:
        record = timed[name]
        try:
            if is_fresh or name not in jobs:
                jobs[name] = factories[name]()
            gc.collect()
            start = clock()
            result = jobs[name]()
            record.seconds.append(clock() - start)
        except Exception as error:
            record.failure = f"{type(error).__name__}: {error}".splitlines()[0]
            return
        if record.result is None:
            record.result = result

    started = clock()
    for name in factories:
        one(name)
    spent = max(clock() - started, 1e-9)
    rounds = min(most_rounds, int(budget / spent)) - 1
    if spent < budget / 2:
        rounds += 1
        for record in timed.values():
            record.seconds.clear()
    for _ in range(rounds):
        for name, record in timed.items():
            if not record.failure:
                one(name)
    return timed


def summary(seconds: list[float]) -> tuple[float, float, float]:
    """Return the median and the 10th and 90th percentile."""
    if len(seconds) == 1:
        return seconds[0], seconds[0], seconds[0]
    deciles = statistics.quantiles(seconds, n=10, method="inclusive")
    return statistics.median(seconds), deciles[0], deciles[-1]
