"""What the curvature benchmark asks of every participant, and the bounds that it is held to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = [
    "COLUMNS",
    "EIGENPAIRS",
    "OUR_STEPS",
    "RTOL_EIGENPAIRS",
    "RTOL_SAMPLED",
    "RUN",
    "WORKS",
    "Factories",
    "Found",
    "Job",
    "Sample",
    "Work",
]

#: Columns of a product of many, products in a run, eigenpairs and the accuracy promised.
COLUMNS, RUN, EIGENPAIRS, RTOL_EIGENPAIRS, RTOL_SAMPLED = 8, 20, 10, 1e-3, 0.01
#: Lanczos steps, the fewest by which a peer has four moments without error. flatminima also uses what the last one leaves over.
STEPS, OUR_STEPS = 3, 2

#: The measured part; what it returns is checked.
Job = Callable[[], Any]
#: By the work's key: prepares (not measured) and returns the measured part.
Factories = Mapping[str, Callable[[], Job]]


@dataclass(frozen=True)
class Work:
    """A row of the table.

    Attributes:
        key: Name on the command line.
        title: Name in the table.
        kind: How the result is checked: "hessian", "gauss-newton", "diagonal", "trace" and so on.
        bound: Most of the best peer's time, by network ("" is every other network).
        memory_bound: Most of the best peer's peak memory.
        columns: Vectors multiplied in one call.
        products: Products among which a time is divided.
        is_fresh: Whether every repeat is prepared anew.
        is_long: Whether it runs in a process of its own, with a limit of time for peers.
    """

    key: str
    title: str
    kind: str
    bound: Mapping[str, float]
    memory_bound: float = 1.0
    columns: int = 1
    products: int = 1
    is_fresh: bool = False
    is_long: bool = False


@dataclass(frozen=True)
class Sample:
    """What a peer's sampler made of fewer probes than its promise needs; its time is scaled to the number needed.

    Attributes:
        num_probes: Probes made.
        moments: Mean over the probes of vᵀ Aʲ v / n, for j = 1 … 4; for a trace the first alone.
    """

    num_probes: int
    moments: tuple[float, ...]


@dataclass(frozen=True)
class Found:
    """Eigenvalues ``(k,)`` and vectors ``(n, k)``, in any order.

    Attributes:
        share: Share of the time that counts, where a peer had to try several sizes to find the one that is enough.
    """

    values: Tensor
    vectors: Tensor
    share: float = 1.0


WORKS = {
    work.key: work
    for work in (
        Work("hessian", "one Hessian product", "hessian", {"": 1.0}),
        Work("run", f"one of {RUN} Hessian products in a run", "hessian", {"": 0.8}, columns=1, products=RUN, is_fresh=True),
        Work("hessian8", "eight Hessian products at once", "hessian", {"": 0.9}, columns=COLUMNS),
        Work("ggn", "one GGN product", "gauss-newton", {"": 1.0}),
        Work("ggn8", "eight GGN products at once", "gauss-newton", {"": 0.9}, columns=COLUMNS),
        Work("ggn-trace", "exact GGN trace", "ggn trace", {"": 0.75}, memory_bound=0.5),
        Work("ggn-diagonal", "exact GGN diagonal", "diagonal", {"": 1.0}),
        Work("trace", "Hessian trace to 1 %", "trace", {"": 0.01, "GPT": 0.5}, is_long=True),
        Work("eigenpairs", f"{EIGENPAIRS} largest eigenpairs to 1e-3", "eigenpairs", {"": 0.7}, is_long=True),
        Work("density3", "spectral density, 4 moments to 1 %, fewest steps a probe", "density", {"": 0.65}, is_long=True),
        Work("density", "the same, with steps until it is resolved", "density", {"": 0.65}, is_long=True),
        Work("run-known", "one in such a run, the way to it known before", "own", {}, products=RUN),
        Work("first", "first two products with one vector", "own", {}, is_fresh=True),
        Work("first8", "first product with eight vectors", "own", {}, is_fresh=True),
    )
}
