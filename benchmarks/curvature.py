"""Compare flatminima's curvature engine with the packages that people use, side by side in one run; print one table of ratios.

    python -m benchmarks.curvature [--quick] [--work hessian run …] [--network lenet mlp …] [--peers curvlinops …]

``make bench`` installs the packages and runs it. Times are in plain gradients over the same data (g), the ratio is to the fastest
peer whose result is right, and the bound stands behind it. Interrupted, it prints the table of what there is.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import growth, memory
from benchmarks.checks import Reference, wrong_eigenvalues
from benchmarks.networks import NETWORKS, Problem, problem
from benchmarks.participants import OURS, available, prepare
from benchmarks.peers import PEERS
from benchmarks.table import Cell, Entry, ratios
from benchmarks.timing import CLOCKS, in_turn, summary
from benchmarks.worker import ask
from benchmarks.works import COLUMNS, RTOL_EIGENPAIRS, RTOL_SAMPLED, RUN, STEPS, WORKS, Work

_EXTRA = ("growth", "leaks")
_UNIT = "gradient"
#: Most residual of an eigenpair over the largest eigenvalue that keeps the promise, rounding included.
_MOST_RESIDUAL = 1.5 * RTOL_EIGENPAIRS
_QUICK_NETWORKS = ("lenet", "mlp")
_QUICK_WORKS = tuple(key for key, work in WORKS.items() if not work.is_long)
#: Most counted rounds, seconds for a short work, seconds within which our long works are repeated, probes for the variances.
_FULL, _QUICK = (7, 12.0, 10.0, 32), (1, 4.0, 0.0, 8)
#: A peer's long work is stopped after this multiple of our wall time, but not before so many seconds; ours after the last.
_PATIENCE, _LEAST_PATIENCE, _MOST_PATIENCE = 3.0, 45.0, 300.0

_FOOTNOTES = f"""
- g: time of one plain gradient of the same loss over the same data by torch.autograd. "0.72 ✓ ≤ 1 PyHessian": 0.72 of the time of
  the fastest peer whose result is right, which is PyHessian; at most 1 is wanted. "memory": peak memory beyond what
  the process held before, over that of the leanest peer, in a process of its own each: {memory.METHOD}.
- Products with one vector and with {COLUMNS} are measured after three of them, of which the second tries the ways that there are;
  what trying costs is in the last rows. The peak memory of a product includes it. A run is {RUN} products from a fresh operator
  and objective with graphs kept, trying included; its objective is built before.
- Every peer is used in the fastest way that it has: PyHessian and BackPACK make many products on one graph, hessian-eigenthings
  a graph for each, curvlinops one vmapped product. GPT: peers get logits as (B, V, T) and attention's math kernel. PyHessian's
  density gets a stand-in for torch.eig.
- Traces and densities of peers: the time of a few probes, times the number of probes that the promise needs by the variance of
  independent probes of plain autograd. For a density that is a standard error of 1 % of the mean of |λ|^j in each of the first
  four moments, with the fewest Lanczos steps a probe that have them: three, and two in flatminima, which uses the last
  off-diagonal entry too; in the row after it flatminima takes steps until the density has settled, and peers' times are
  multiplied by as many steps as that took on average, over three.
- Eigenpairs: each is asked for a residual of 1e-3 in its own terms: SciPy's and hessian-eigenthings' is relative to each |λ|,
  flatminima's to the largest, PyHessian's the change of λ. Values are held against the largest Ritz values of anyone's vectors.
  Only the last attempt of hessian-eigenthings counts, whose number of steps is found by doubling. "out of time":
  stopped after {_PATIENCE:g} times our time and {_LEAST_PATIENCE:g} s, and ours after {_MOST_PATIENCE:g} s.
"""


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of the packages that are compared
    peers, missing = available(arguments.peers)
    for reason in missing.values():
        print(f"left out: {reason}")
    bench = _Bench(arguments, [OURS, *peers])
    try:
        for network in arguments.network:
            bench.network(network)
        bench.extra()
    except KeyboardInterrupt:
        print("\ninterrupted; this is what there is")
    print(f"\nClock: {arguments.clock}. {time.strftime('%Y-%m-%d')}, torch {torch.__version__}, one thread.\n")
    print(ratios(bench.cells, bench.headings))
    for table in bench.tables:
        print(f"\n{table}")
    print(_FOOTNOTES)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of LeNet-5 and the MLP: no memory, no long works")
    parser.add_argument("--work", nargs="+", choices=[*WORKS, *_EXTRA], help="works (default all)")
    parser.add_argument("--network", nargs="+", choices=list(NETWORKS), help="networks (default all)")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS), help="peers (default all)")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu where the machine is busy (default wall)")
    arguments = parser.parse_args()
    arguments.network = arguments.network or list(_QUICK_NETWORKS if arguments.quick else NETWORKS)
    arguments.work = arguments.work or list(_QUICK_WORKS if arguments.quick else [*WORKS, *_EXTRA])
    return arguments


class _Bench:
    def __init__(self, arguments: argparse.Namespace, participants: list[str]) -> None:
        self.participants, self.clock_name, self.is_quick = participants, arguments.clock, arguments.quick
        self.clock = CLOCKS[arguments.clock]
        self.rounds, self.budget, self.long_budget, self.probes = _QUICK if arguments.quick else _FULL
        self.works = [work for key, work in WORKS.items() if key in arguments.work]
        self.extras = [key for key in _EXTRA if key in arguments.work]
        self.cells: list[Cell] = []
        self.headings: dict[str, str] = {}
        self.tables: list[str] = []

    def network(self, key: str) -> None:
        """Measure all works on a network."""
        given = problem(key)
        gradient = self._gradient(given)
        self.headings[given.name] = f"{given.size:,} parameters, {given.note}, g = {gradient * 1e3:.0f} ms"
        print(f"\n{given.name}: {self.headings[given.name]}", flush=True)
        short = [work for work in self.works if not work.is_long]
        if short:
            self._short(key, given, gradient, short)
        long = [work for work in self.works if work.is_long]
        variances = self._variances(key) if any(work.kind in ("trace", "density") for work in long) else None
        for work in long:
            self._show(self._long(key, Cell(given.name, work, gradient), variances))

    def extra(self) -> None:
        """Make the tables that have no peers."""
        if "growth" in self.extras:
            for table in (growth.over_examples, growth.over_parameters):
                self._add(lambda table=table: table(self.clock, self.rounds, max(self.budget, 1.0)))
        if "leaks" in self.extras:
            self._add(growth.after_many_products)

    def _add(self, make: Callable[[], str]) -> None:
        try:
            self.tables.append(make())
        except Exception as error:
            self.tables.append(f"failed: {type(error).__name__}: {error}")
        print(f"\n{self.tables[-1]}", flush=True)

    def _gradient(self, given: Problem) -> float:
        timed = in_turn({"": lambda: given.gradient}, clock=self.clock, most_rounds=9, budget=5.0)
        return statistics.median(timed[""].seconds)

    def _show(self, cell: Cell) -> None:
        self.cells.append(cell)
        print("\n".join(cell.lines()), flush=True)

    # --- short works: times in turn within this process, memory elsewhere ---------------------------------------------------

    def _short(self, key: str, given: Problem, gradient: float, works: list[Work]) -> None:
        reference = Reference(given)
        known = {participant: prepare(participant, given) for participant in self.participants}
        keys = [work.key for work in works]
        peaks = {} if self.is_quick else {participant: ask(key, participant, keys) for participant in self.participants}
        for work in works:
            cell = Cell(given.name, work, gradient)
            factories = {name: made[work.key] for name, made in known.values() if work.key in made}
            factories[_UNIT] = lambda: given.gradient
            timed = in_turn(factories, clock=self.clock, most_rounds=self.rounds, budget=self.budget, is_fresh=work.is_fresh)
            cell.gradient = summary(timed[_UNIT].seconds)[0]
            for participant, (name, _) in known.items():
                if name not in timed:
                    cell.entries[name] = Entry(fault="–")
                    continue
                entry = cell.entries[name] = Entry(peak=peaks.get(participant, {}).get(work.key, {}).get("peak"))
                entry.fault = timed[name].failure or reference.complaint(work, timed[name].result)
                if timed[name].seconds:
                    entry.times, entry.rounds = summary(timed[name].seconds), len(timed[name].seconds)
            self._show(cell)

    # --- long works: each in a process of its own -------------------------------------------------------------------------

    def _variances(self, key: str) -> torch.Tensor:
        """Return mean and variance of vᵀ Hʲ v / n over probes, shape ``(2, 4)``."""
        answer = ask(key, "probes", [str(self.probes)])[str(self.probes)]
        if isinstance(answer, dict):
            raise RuntimeError(f"the variances could not be sampled: {answer['failure']}")
        rows = torch.tensor(answer, dtype=torch.float64)
        return torch.stack([rows.mean(0), rows.var(0)])

    def _long(self, key: str, cell: Cell, variances: torch.Tensor | None) -> Cell:
        answers: dict[str, list[dict[str, Any]]] = {participant: [] for participant in self.participants}
        names = {participant: prepare(participant, problem(key)) for participant in self.participants}
        started, limit = time.perf_counter(), None
        for turn in range(3):
            for participant, (_, known) in names.items():
                failed = answers[participant] and "failure" in answers[participant][-1]
                if cell.work.key in known and not failed:
                    bound = _MOST_PATIENCE if participant == OURS or limit is None else limit
                    answer = ask(key, participant, [cell.work.key], seed=turn, limit=bound)[cell.work.key]
                    answers[participant].append(answer)
                    if participant == OURS and "wall" in answer:
                        limit = max(_LEAST_PATIENCE, _PATIENCE * answer["wall"])
            if time.perf_counter() - started > self.long_budget:
                break
        mine = next((answer for answer in answers[OURS] if "scale" in answer), None)
        units = [a["gradient"][self.clock_name] for those in answers.values() for a in those if "gradient" in a]
        cell.gradient = statistics.median(units) if units else cell.gradient
        best = _largest_ritz([a["ritz"] for those in answers.values() for a in those if "ritz" in a])
        for participant, (name, _) in names.items():
            cell.entries[name] = self._entry(cell.work, answers[participant], variances, mine, best)
        return cell

    def _entry(
        self,
        work: Work,
        answers: list[dict[str, Any]],
        variances: torch.Tensor | None,
        mine: dict[str, Any] | None,
        best: list[float],
    ) -> Entry:
        if not answers:
            return Entry(fault="–")
        good = [answer for answer in answers if "failure" not in answer]
        if not good:
            reason = answers[0]["failure"]
            return Entry(fault="out of time" if reason == "time" else f"failed: {reason}")
        entry = Entry(rounds=len(good), peak=max(answer["peak"] for answer in good), note=good[0].get("note", ""))
        factor = 1.0
        if work.kind == "eigenpairs":
            entry.fault = wrong_eigenvalues(good[0]["values"], best)
            if not entry.fault and good[0]["residual"] > _MOST_RESIDUAL:
                entry.fault = f"wrong: a residual of {good[0]['residual']:.1e}"
            entry.note = f"residuals ≤ {good[0]['residual']:.1e} of the largest λ, {good[0]['own residual']:.1e} of each"
        elif variances is not None:
            entry.fault = _off(good[0], variances, mine and mine["scale"], self.probes)
            if "probes" in good[0] and mine is not None:
                needed = max(2.0, *_probes_needed(variances, mine["scale"]))
                factor = needed / good[0]["probes"]
                entry.note = f"{needed:,.0f} probes needed, measured on {good[0]['probes']}"
                if work.key == "density" and mine["steps"] > STEPS:
                    factor *= mine["steps"] / STEPS
                    entry.note += f", {mine['steps']:.0f} steps each"
        entry.times = summary([answer[self.clock_name] * answer.get("share", 1.0) * factor for answer in good])
        return entry


def _probes_needed(variances: torch.Tensor, scale: list[float]) -> list[float]:
    return [float(variances[1, j]) / (RTOL_SAMPLED * one) ** 2 for j, one in enumerate(scale)]


def _off(answer: dict[str, Any], variances: torch.Tensor, scale: list[float] | None, probes: int) -> str:
    """Return what is wrong with moments: farther than five standard errors from those of independent probes."""
    for j, moment in enumerate(answer["moments"]):
        samples = answer.get("probes")
        error = (variances[1, j] * (1 / probes + (1 / samples if samples else 0))).sqrt()
        allowed = 5 * float(error) + (0 if samples or scale is None else 5 * RTOL_SAMPLED * scale[j])
        if samples is not None and samples < 4:
            allowed *= 3  # one probe's higher moments are far from normal
        if abs(moment - float(variances[0, j])) > allowed:
            return f"wrong: moment {j + 1} is {moment:.3g}, not {float(variances[0, j]):.3g}"
    return "" if answer.get("converged", True) else "did not converge"


def _largest_ritz(found: list[list[float]]) -> list[float]:
    """Return the largest value in each place: no Ritz value is above the true eigenvalue of its place."""
    return [max(values) for values in zip(*found, strict=True)]


if __name__ == "__main__":
    main()
