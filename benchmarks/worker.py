"""One participant in a process of its own: peak memory of each work, and the times and results of the long ones.

Every work runs in a fork that has imported everything and computed nothing; it prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import checks
from benchmarks.memory import PeakMeter
from benchmarks.networks import Problem, problem
from benchmarks.participants import prepare
from benchmarks.timing import CLOCKS
from benchmarks.works import WORKS, Job

__all__ = ["ask"]

_ROOT = Path(__file__).resolve().parents[1]
_PROBES = "probes"
#: Products of a run, for its peak memory; its time is taken elsewhere.
_RUN = 4


def ask(network: str, participant: str, works: list[str], *, seed: int = 0, limit: float | None = None) -> dict[str, Any]:
    """Run works of a participant elsewhere; return by work what they cost and gave, or {"failure": why}.

    Args:
        network: Key of the network.
        participant: Key of the participant, or "probes" for moments of so many random probes as the only work says.
        works: Keys.
        seed: Of torch's random numbers.
        limit: Wall seconds before it is stopped; works without an answer then have the failure "time".
    """
    command = [sys.executable, "-m", "benchmarks.worker", network, participant, str(seed), *works]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=limit)
        reason = err.strip().splitlines()[-1] if process.returncode and err.strip() else "no answer"
    except subprocess.TimeoutExpired:
        out, reason = _stop(process), "time"
    except BaseException:
        _stop(process)
        raise
    lines = (line.split("\t", 1)[1] for line in out.splitlines() if line.startswith("answer\t"))
    answers: dict[str, Any] = {}
    for line in lines:
        answers.update(json.loads(line))
    return {work: answers.get(work, {"failure": reason}) for work in works}


def _stop(process: subprocess.Popen[str]) -> str:
    os.killpg(process.pid, 9)
    return process.communicate()[0] or ""


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network")
    parser.add_argument("participant")
    parser.add_argument("seed", type=int)
    parser.add_argument("works", nargs="+")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of the packages that are compared
    given = problem(arguments.network)
    if arguments.participant == _PROBES:
        (count,) = arguments.works
        _answer({count: checks.moments_of_probes(given, int(count))})
        return
    _, factories = prepare(arguments.participant, given, _RUN)
    for work in arguments.works:
        if work not in factories:
            _answer({work: {"failure": ""}})
            continue
        child = os.fork()
        if child == 0:
            status = 1
            try:
                torch.manual_seed(arguments.seed)
                _answer({work: _measured(given, factories[work], work)})
                status = 0
            finally:
                os._exit(status)
        os.waitpid(child, 0)


def _measured(given: Problem, factory: Callable[[], Job], work: str) -> dict[str, Any]:
    try:
        gradient = _gradient_seconds(given)
        meter = PeakMeter()
        job = factory()
        seconds, result = _seconds_of(job)
        peak = meter.bytes()
        told = checks.numbers(given, result) if WORKS[work].is_long else {}
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {**seconds, "peak": peak, "gradient": gradient, **told}


def _gradient_seconds(given: Problem) -> dict[str, float]:
    """Return the median times of a plain gradient by clock, after one that loads the kernels."""
    _, *rounds = (_seconds_of(given.gradient)[0] for _ in range(4))
    return {name: statistics.median(seconds[name] for seconds in rounds) for name in CLOCKS}


def _seconds_of(job: Job) -> tuple[dict[str, float], Any]:
    started = {name: clock() for name, clock in CLOCKS.items()}
    result = job()
    return {name: clock() - started[name] for name, clock in CLOCKS.items()}, result


def _answer(what: dict[str, Any]) -> None:
    sys.stdout.write(f"answer\t{json.dumps(what)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main()
