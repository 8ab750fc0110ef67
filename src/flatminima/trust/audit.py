"""audit: measure, move the network along its own symmetries, measure again, and say which numbers survived."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import final

import torch

from flatminima import measures as all_measures
from flatminima._checks import check_at_least, check_generator, check_positive
from flatminima._errors import FlatminimaError, NotSupported, first_line
from flatminima._progress import Progress, no_progress
from flatminima.measures import Measure
from flatminima.objective import Objective, digest
from flatminima.objective.consistency import check_derivative
from flatminima.symmetries import Symmetries, find_symmetries, model_at
from flatminima.trust.moves import Attacks, draw_moves, move_to_canonical
from flatminima.trust.point import check_minimum, zero_rows
from flatminima.trust.result import Audit, MinimumCheck, Reading, Row, Spectrum
from flatminima.trust.verdict import attack, overall

__all__ = ["audit", "check_scale"]

_EXAMPLES_CHECKED = 64
_LARGEST_SCALE = 10.0


def audit(
    objective: Objective,
    *,
    measures: Sequence[Measure | str] | None = None,
    num_moves: int = 3,
    scale: float = 1.0,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = torch.float64,
    target: str = "",
    command: str = "",
    progress: Progress = no_progress,
    on_update: Callable[[Audit], None] | None = None,
) -> Audit:
    """Measure the sharpness of a network, and find out which of the numbers can be trusted.

    Every measure is taken at the network as it is, after random moves along each kind of symmetry that the network has (the
    outputs are checked to be the same to 1e-10 after each), and at the canonical form. A number that a move changes is a
    property of the coordinates, not of the function. An l2 term of the objective is left out of the measures, since no rescaling
    leaves it unchanged; it counts in the check whether the point is a minimum.

    Args:
        objective: The loss; the model is not changed.
        measures: Measures or their names; all of ``flatminima.measures.available()`` by default.
        num_moves: Random moves along each kind of symmetry.
        scale: Standard deviation of the log of each factor of a rescaling, and the size of a shift relative to the weights.
        generator: Source of the moves and of the measures' probes; None is torch's global one. Every reading of a measure uses
            the same probes.
        dtype: Floating point type to compute in; the moves are always made in float64. None keeps the model's own, in which
            rounding moves exact measures by up to a per cent, and verdicts allow for that.
        target: What is audited, for the report.
        command: Command line that repeats it, for the report.
        progress: Told of every reading.
        on_update: Called with the audit so far after every measure, so that an interruption loses nothing.

    Returns:
        The trust table; ``to_json`` and ``to_html`` write it.

    Raises:
        NotSupported: If the objective was made from a closure, or its loss calls the model itself: there is nothing to trace.
        NotEquivalent: If a move changed the outputs (a defect in the symmetry).
        ValueError: If a measure is unknown, or there is none.
        TypeError: If an entry of ``measures`` is no measure.
    """
    if not isinstance(objective, Objective):
        raise TypeError(f"`objective` must be a flatminima.Objective. Got {type(objective).__name__}.")
    if not objective.has_model:
        raise NotSupported("An audit moves the model, so the objective must be Objective(model, loss(outputs, targets), data).")
    chosen = _checked_measures(measures)
    check_at_least("num_moves", num_moves, 1)
    check_scale(scale)
    seed = _seed(check_generator(generator))
    run = _Run(objective, chosen, num_moves, scale, seed, dtype, target, command, progress)
    for partial in run.steps():
        if on_update is not None:
            on_update(partial)
    return run.result(complete=True)


@final
class _Run:
    """One audit under way."""

    def __init__(
        self,
        objective: Objective,
        measures: tuple[Measure, ...],
        num_moves: int,
        scale: float,
        seed: int,
        dtype: torch.dtype | None,
        target: str,
        command: str,
        progress: Progress,
    ) -> None:
        self.started = time.monotonic()
        self.original = objective if dtype is None else objective.to(dtype)
        # Moves in float64, whatever the arithmetic of the measures: rounding moved weights would change the function.
        self.model = model_at(objective).double()
        self.objective = objective.with_model(self.model).to(dtype or objective.dtype).without_l2().in_memory()
        try:
            self.objective.value()
        except RuntimeError as error:
            raise ValueError(
                f"The model does not run in {dtype or objective.dtype}: {first_line(error)} If its code makes tensors of a fixed "
                "type, let it take the type of its inputs, or pass dtype=None to compute in the model's own."
            ) from error
        self.measures, self.num_moves, self.scale, self.seed = measures, num_moves, scale, seed
        self.target, self.command, self.progress = target, command, progress
        self.notes: list[str] = []
        self.minimum: MinimumCheck | None = None
        self.spectrum: Spectrum | None = None
        self.attacks: list[Attacks] = []
        self.rows: list[Row] = []
        self.canonical: Objective | None = None
        self.canonical_form = ""
        self.done, self.total = 0, 3 + 2 * len(measures)
        self.digests: dict[str, str] = {
            "network": digest([*self.model.parameters(), *self.model.buffers()]),
            "data": objective.data_digest,
        }

    def steps(self) -> Iterator[Audit]:
        """Do the work, and yield the audit so far after each part of it."""
        if self.objective.mode == "train":
            self.notes.append("Train mode: BatchNorm uses each batch's own statistics, and examples of a batch are coupled.")
        if not (derivative := check_derivative(self.original, generator=self._generator())):
            self.notes.append(str(derivative))
        self._tell("looking whether this is a minimum")
        self._check_minimum()
        yield self.result(complete=False)
        self._tell("finding symmetries")
        symmetries = find_symmetries(self.objective)
        self.notes += [f"Not covered: {note}." for note in symmetries.notes]
        self._move(symmetries)
        for measure in self.measures:
            self.rows.append(self._row(measure))
            yield self.result(complete=False)

    def _check_minimum(self) -> None:
        self.minimum, self.spectrum, notes = check_minimum(self.original, self._generator())
        zero = zero_rows(self.objective, self._generator())
        self.minimum = replace(self.minimum, num_products=self.minimum.num_products + 1)
        if zero:
            self.notes.append(
                f"Zero rows of the Hessian (the loss uses them linearly or not at all, or is flat here): {', '.join(zero)}."
            )
        self.notes += notes

    def _move(self, symmetries: Symmetries) -> None:
        self.attacks, notes = draw_moves(
            self.model,
            symmetries,
            self._example_inputs(),
            num_moves=self.num_moves,
            scale=self.scale,
            generator=self._generator(),
        )
        self.notes += notes
        self.total = 3 + len(self.measures) * (2 + sum(len(a.moves) for a in self.attacks))
        self._tell("canonical form")
        move, self.canonical_form, notes = move_to_canonical(self.objective, symmetries)
        self.canonical = self.objective.with_model(move.apply(self.model)) if move is not None else None
        self.notes += notes

    def _row(self, measure: Measure) -> Row:
        base = self._read(measure, self.objective, f"{measure.title}: as it is")
        if base.value == 0:
            base = replace(
                base, value=None, error="the value is 0, or below the rounding of the loss: a degenerate case that says nothing"
            )
        attacks = []
        for group in self.attacks if base.value is not None else ():
            readings = tuple(
                self._read(
                    measure,
                    self.objective.with_model(move.apply(self.model)),
                    f"{measure.title}: {group.record.kind} {index + 1}/{len(group.moves)}",
                )
                for index, move in enumerate(group.moves)
            )
            declared = measure.invariances[group.record.kind]
            attacks.append(attack(group.record.kind, declared, base, readings, rtol=self._rtol))
        canonical = None
        if self.canonical is not None and base.value is not None:
            canonical = self._read(measure, self.canonical, f"{measure.title}: canonical form")
        return Row(
            name=repr(measure),
            key=measure.key,
            source=measure.source,
            formula=measure.formula,
            meaning=measure.meaning,
            base=base,
            attacks=tuple(attacks),
            canonical=canonical,
            verdict=overall(base, attacks),
            title=measure.title,
        )

    def _read(self, measure: Measure, objective: Objective, message: str) -> Reading:
        self._tell(message)
        start = time.monotonic()
        try:
            estimate = measure(objective, generator=self._generator())
        except (FlatminimaError, ValueError, RuntimeError) as error:
            return Reading(None, error=first_line(error), seconds=time.monotonic() - start)
        low, high = estimate.interval()
        sampled = estimate.num_samples is not None and bool(estimate.stderr > 0)
        interval = (float(low), float(high)) if sampled else None
        reading = Reading(**estimate.to_dict(), interval=interval, seconds=time.monotonic() - start)
        if not bool(torch.isfinite(estimate.value)):
            return replace(reading, value=None, error=f"the value is {float(estimate):g}")
        return reading

    @property
    def _rtol(self) -> float:
        """How far an exact number may move and count as unchanged."""
        return 1e-6 if self.objective.dtype == torch.float64 else 1e-2

    def _generator(self) -> torch.Generator:
        """Return a fresh generator at the audit's seed: all readings of a measure share their probes."""
        return torch.Generator(self.objective.device).manual_seed(self.seed)

    def _example_inputs(self) -> object:
        args, kwargs = self.objective.example_inputs(_EXAMPLES_CHECKED)
        return kwargs if kwargs else args

    def _tell(self, message: str) -> None:
        self.progress(self.done, self.total, message)
        self.done += 1

    def result(self, *, complete: bool) -> Audit:
        """Return the audit so far."""
        if complete:
            self.progress(self.total, self.total, "done")
        return Audit(
            target=self.target or type(self.original.model).__name__,
            complete=complete,
            num_parameters=self.original.space.size,
            num_examples=self.original.num_examples,
            loss_name=_loss_name(self.original),
            minimum=self.minimum,
            spectrum=self.spectrum,
            symmetries=tuple(a.record for a in self.attacks),
            rows=tuple(self.rows),
            notes=tuple(self.notes),
            settings={
                "seed": self.seed,
                "num_moves": self.num_moves,
                "scale": self.scale,
                "dtype": str(self.objective.dtype).removeprefix("torch."),
                "device": str(self.objective.device),
                "mode": self.objective.mode,
                "l2": self.original.l2,
                "num_terms": self.original.num_terms,
                "canonical_form": self.canonical_form,
                "relative_tolerance": self._rtol,
                "measures": [repr(m) for m in self.measures],
                "versions": {
                    "flatminima": version("flatminima"),
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
                "threads": torch.get_num_threads(),
                "sha256": self.digests,
            },
            command=self.command,
            seconds=time.monotonic() - self.started,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def check_scale(scale: float) -> float:
    """Return the size of moves if it is positive and its exponential no danger to the arithmetic."""
    if check_positive("scale", scale) > _LARGEST_SCALE:
        raise ValueError(f"`scale` must be at most {_LARGEST_SCALE:g} (factors are exp of it, and overflow). Got {scale:g}.")
    return scale


def _checked_measures(measures: Sequence[Measure | str] | None) -> tuple[Measure, ...]:
    """Return the measures by name or as given; all of them where there is no choice."""
    if measures is None:
        return tuple(all_measures.get(name) for name in all_measures.available())
    if isinstance(measures, str) or not isinstance(measures, Sequence) or not measures:
        got = repr(measures) if isinstance(measures, str | Sequence) else type(measures).__name__
        raise ValueError(f"`measures` must be a list of names or measures, at least one; None takes all. Got {got}.")
    chosen = tuple(all_measures.get(m) if isinstance(m, str) else m for m in measures)
    for measure in chosen:
        if not isinstance(measure, Measure):
            hint = f" Write {measure.__name__}()." if isinstance(measure, type) else ""
            raise TypeError(f"`measures` must hold names or flatminima.measures.Measure objects. Got {measure!r}.{hint}")
    return chosen


def _seed(generator: torch.Generator | None) -> int:
    """Return the seed of a generator that was not used yet, or draw one."""
    if generator is None:
        return int(torch.randint(2**31, ()))
    fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    if torch.equal(fresh.get_state(), generator.get_state()):
        seed = generator.initial_seed()
        torch.rand((), generator=generator, device=generator.device)  # two audits with one generator are two draws
        return seed
    return int(torch.randint(2**31, (), generator=generator, device=generator.device))


def _loss_name(objective: Objective) -> str:
    loss = objective.loss
    return loss.name if loss.name != "custom" else getattr(loss.function, "__name__", type(loss.function).__name__)
