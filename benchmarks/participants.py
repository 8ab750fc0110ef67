"""Who takes part, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType

from benchmarks import ours, peers
from benchmarks.networks import Problem
from benchmarks.works import RUN, Factories, Job

__all__ = ["OURS", "available", "prepare"]

OURS = "flatminima"


def available(wanted: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the keys of the peers that can be imported, and the reasons of the others."""
    loaded = {key: peers.load(key) for key in wanted}
    return [k for k, m in loaded.items() if not isinstance(m, str)], {k: m for k, m in loaded.items() if isinstance(m, str)}


def prepare(key: str, problem: Problem, length: int = RUN) -> tuple[str, Factories]:
    """Return a participant's name in the table and its works on a copy of the problem, with a run of so many products."""
    module = ours if key == OURS else peers.load(key)
    assert isinstance(module, ModuleType), module
    own = problem.own()
    factories: Factories = module.factories(own, length)
    if key != OURS:
        factories = {work: _differentiable(own, factory) for work, factory in factories.items()}
    return module.NAME, factories


def _differentiable(problem: Problem, factory: Callable[[], Job]) -> Callable[[], Job]:
    """Let a peer prepare and run where attention has second derivatives."""

    @wraps(factory)
    def prepare() -> Job:
        with problem.differentiable():
            job = factory()

        def run() -> object:
            with problem.differentiable():
                return job()

        return run

    return prepare
