"""How cost grows with examples and parameters, and whether many products leave memory where it was."""

from __future__ import annotations

import math
import multiprocessing
import statistics
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

import flatminima as fm
from benchmarks.memory import resident
from benchmarks.networks import Problem, digits, mlp, problem
from benchmarks.timing import in_turn, summary

__all__ = ["after_many_products", "over_examples", "over_parameters"]

_EXAMPLES = (512, 1024, 2048, 4096)
_WIDTHS = (256, 512, 1024, 2048)
_EXAMPLES_OF_WIDE = 256
_PRODUCTS = (10, 100, 1000)
_FEW_EXAMPLES = 32


def over_examples(clock: Callable[[], float], rounds: int, budget: float) -> str:
    """Return the table of LeNet-5 with more and more images."""
    base = problem("lenet")
    problems = [Problem(base.name, base.model, *digits(count)) for count in _EXAMPLES]
    return _table("images", "LeNet-5", problems, list(_EXAMPLES), clock, rounds, budget)


def over_parameters(clock: Callable[[], float], rounds: int, budget: float) -> str:
    """Return the table of wider and wider perceptrons."""
    problems = [mlp(width, _EXAMPLES_OF_WIDE) for width in _WIDTHS]
    return _table("parameters", f"MLP, {_EXAMPLES_OF_WIDE} images", problems, [p.size for p in problems], clock, rounds, budget)


def _table(
    what: str,
    title: str,
    problems: Sequence[Problem],
    sizes: Sequence[int],
    clock: Callable[[], float],
    rounds: int,
    budget: float,
) -> str:
    lines = [f"| {what} ({title}) | gradient | Hessian product | GGN product | exact GGN trace |", "|---|---|---|---|---|"]
    columns: list[list[float]] = []
    for given, size in zip(problems, sizes, strict=True):
        objective = fm.Objective(given.model, functional.cross_entropy, given.data)
        H, G, v = fm.Hessian(objective), fm.GaussNewton(objective), given.vectors(1)[:, 0]
        for _ in range(3):
            H @ v, G @ v
        jobs = {
            "gradient": given.gradient,
            "hessian": lambda H=H, v=v: H @ v,
            "ggn": lambda G=G, v=v: G @ v,
            "trace": lambda G=G: fm.trace(G),
        }
        timed = in_turn({k: lambda j=j: j for k, j in jobs.items()}, clock=clock, most_rounds=rounds, budget=budget / len(sizes))
        seconds = [summary(record.seconds)[0] for record in timed.values()]
        columns.append(seconds)
        cells = [f"{s * 1e3:.0f} ms" + (f" ({s / seconds[0]:.1f} g)" if i else "") for i, s in enumerate(seconds)]
        lines.append(f"| {size:,} | " + " | ".join(cells) + " |")
    powers = [_power(sizes, [row[i] for row in columns]) for i in range(len(columns[0]))]
    lines.append(f"| cost ∝ {what} to the power | " + " | ".join(f"{p:.2f}" for p in powers) + " |")
    return "\n".join(lines)


def _power(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    slope, _ = statistics.linear_regression([math.log(s) for s in sizes], [math.log(t) for t in seconds])
    return slope


def after_many_products() -> str:
    """Return a table of the resident memory after so many products, each kind in a process of its own."""
    lines = ["| products | " + " | ".join(f"after {n:,}" for n in _PRODUCTS) + " |", "|---" * (len(_PRODUCTS) + 1) + "|"]
    for kind in ("Hessian", "Hessian, graphs kept", "GaussNewton"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            sizes = pool.apply(_resident_after, (kind,))
        lines.append(f"| {kind} | " + " | ".join(f"{size / 2**20:.1f} MiB" for size in sizes) + " |")
    return "\n".join(lines)


def _resident_after(kind: str) -> list[int]:
    torch.set_num_threads(1)
    given = problem("lenet")
    few = (given.inputs[:_FEW_EXAMPLES], given.targets[:_FEW_EXAMPLES])
    objective = fm.Objective(given.model, functional.cross_entropy, few)
    A = fm.GaussNewton(objective) if kind == "GaussNewton" else fm.Hessian(objective)
    v, sizes = given.vectors(1)[:, 0], []

    def go() -> None:
        for count in range(1, _PRODUCTS[-1] + 1):
            A @ v
            if count in _PRODUCTS:
                sizes.append(resident())

    if "kept" in kind:
        with A.keeping_graphs():
            go()
    else:
        go()
    return sizes
