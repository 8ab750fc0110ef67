"""Audit: what an audit found, as plain data that goes to JSON and comes back."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["SCHEMA", "Attack", "Audit", "MinimumCheck", "Reading", "Row", "Spectrum", "SymmetryRecord"]

#: Name and version of the JSON layout. The version rises when a reader of the old one would misread the new one.
SCHEMA = "flatminima.audit/1"

SURVIVES, MOVES, DEFECT, FAILED = "survives", "moves", "defect", "failed"
MINIMUM, SADDLE, SLOPE, UNKNOWN = "minimum", "saddle", "slope", "unknown"


@dataclass(frozen=True)
class Reading:
    """One value of one measure.

    Attributes:
        value: The number; None where it could not be computed.
        stderr: Its standard error; 0 where it is exact.
        interval: The 95 % confidence interval; None where the value is exact or no sampling stands behind it.
        num_samples: Independent samples behind the standard error; None where there are none.
        method: How it was obtained.
        converged: Whether the requested tolerance was met.
        num_products: Products with a curvature matrix.
        num_gradients: Further gradients over the data.
        num_losses: Further forward passes over the data.
        seconds: Wall time.
        details: Further numbers, such as the first- and second-order part of a perturbation measure.
        error: Why there is no value, or "".
    """

    value: float | None
    stderr: float = 0.0
    interval: tuple[float, float] | None = None
    num_samples: int | None = None
    method: str = "exact"
    converged: bool = True
    num_products: int = 0
    num_gradients: int = 0
    num_losses: int = 0
    seconds: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Attack:
    """One measure under random moves along one kind of symmetry.

    Attributes:
        symmetry: Kind of the symmetry ("layer", "node", "permutation", "norm-scale", "softmax shift").
        declared_invariant: What the measure claims.
        readings: The value after each move, in the order of the moves.
        folds: Largest of new/old and old/new for each move, at least 1; None where the sign changed or a value is missing.
        verdict: "survives", "moves", "defect" (declared invariant, but moved) or "failed".
    """

    symmetry: str
    declared_invariant: bool
    readings: tuple[Reading, ...]
    folds: tuple[float | None, ...]
    verdict: str

    @property
    def fold(self) -> float | None:
        """The largest fold change over the moves; None where a sign changed or a value is missing."""
        known = [f for f in self.folds if f is not None]
        return max(known) if known and len(known) == len(self.folds) else None


@dataclass(frozen=True)
class Row:
    """Everything about one measure.

    Attributes:
        name: The measure's name, with its settings.
        key: The name by which it is asked for.
        source: Paper.
        formula: In plain text.
        meaning: One sentence that a newcomer understands.
        base: The value at the network as given.
        attacks: One entry per kind of symmetry found.
        canonical: The value at the canonical form (None where there is none).
        verdict: "survives" if no attack moved it, "moves", "defect" or "failed".
        title: Name for people, without the settings; "" where there is none.
    """

    name: str
    key: str
    source: str
    formula: str
    meaning: str
    base: Reading
    attacks: tuple[Attack, ...]
    canonical: Reading | None
    verdict: str
    title: str = ""


@dataclass(frozen=True)
class SymmetryRecord:
    """A kind of symmetry that was found and how far the moves along it went.

    Attributes:
        kind: See Attack.symmetry.
        dimension: Number of free continuous parameters (0 for a permutation).
        description: In words.
        num_moves: Random moves made.
        max_output_difference: Largest relative change of the outputs over the moves, in float64 (log-softmax where the
            symmetry shifts the logits).
    """

    kind: str
    dimension: int
    description: str
    num_moves: int
    max_output_difference: float


@dataclass(frozen=True)
class MinimumCheck:
    """Is this a minimum at all?

    Attributes:
        loss: L.
        gradient_norm: ‖∇L‖₂.
        smallest_eigenvalue: λ_min of the Hessian.
        smallest_residual: ‖Hv − λv‖ of it.
        largest_eigenvalue: λ_max of the Hessian.
        noise: Size below which an eigenvalue counts as zero.
        verdict: "minimum" (flat directions aside), "saddle" where the loss falls far along a direction in which it bends down,
            "slope" where further training would still lower it, or "unknown" where it slopes without the curvature that could
            tell how far.
        reference_loss: Loss of outputs that do not depend on the inputs; None where it is not defined.
        expected_fall: How far the loss would fall still: by a Gauss–Newton step, and at most by the loss itself if that is
            never negative; 0 where that is less than the rounding of the loss.
        num_products: Products with a curvature matrix that the check took.
        saddle_fall: How far the loss was seen to fall below its tangent along a direction of negative curvature; 0 where there
            is none, where that is less than the rounding of the loss, or where the loss itself is too small to fall far.
    """

    loss: float
    gradient_norm: float
    smallest_eigenvalue: float
    smallest_residual: float
    largest_eigenvalue: float
    noise: float
    verdict: str
    reference_loss: float | None
    expected_fall: float
    num_products: int = 0
    saddle_fall: float = 0.0


@dataclass(frozen=True)
class Spectrum:
    """Both ends of the Hessian's spectrum.

    Attributes:
        largest: Largest eigenvalues, descending.
        smallest: Smallest eigenvalues, descending.
        residuals: Residuals of largest, then of smallest.
    """

    largest: tuple[float, ...]
    smallest: tuple[float, ...]
    residuals: tuple[float, ...]


@dataclass(frozen=True)
class Audit:
    """The trust table and what is needed to believe and to repeat it.

    Attributes:
        target: What was audited, in the user's words.
        complete: False if the audit was interrupted; what had been computed is there.
        num_parameters: n.
        num_examples: Examples that the loss was taken over.
        loss_name: The loss function.
        minimum: Whether the point is a minimum.
        spectrum: Both ends of the Hessian's spectrum.
        symmetries: What was found and moved along.
        rows: One per measure.
        notes: What was not covered, and other remarks.
        settings: Everything that fixes the result: seed, moves, scale, dtype, measures, versions.
        command: Command line that repeats it, or "".
        seconds: Wall time of the whole audit.
        created: ISO 8601 time, UTC.
        schema: Layout of the JSON.
    """

    target: str
    complete: bool
    num_parameters: int
    num_examples: int
    loss_name: str
    minimum: MinimumCheck | None
    spectrum: Spectrum | None
    symmetries: tuple[SymmetryRecord, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    settings: dict[str, Any]
    command: str
    seconds: float
    created: str
    schema: str = SCHEMA

    @property
    def num_products(self) -> int:
        """Products with a curvature matrix, over all readings and the check of the minimum."""
        check = self.minimum.num_products if self.minimum else 0
        return check + sum(reading.num_products for reading in self.readings())

    @property
    def num_gradients(self) -> int:
        """Gradients over the data, over all readings."""
        return sum(reading.num_gradients for reading in self.readings())

    @property
    def num_losses(self) -> int:
        """Forward passes over the data, over all readings."""
        return sum(reading.num_losses for reading in self.readings())

    def readings(self) -> list[Reading]:
        """Return all readings of all rows."""
        found = []
        for row in self.rows:
            found += [row.base, *([row.canonical] if row.canonical else [])]
            found += [reading for attack in row.attacks for reading in attack.readings]
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values; infinities and NaN become None, which JSON can hold."""
        result = _finite(asdict(self))
        assert isinstance(result, dict)
        return {"schema": result.pop("schema"), **result}

    def to_json(self, path: str | Path) -> Path:
        """Write ``to_dict`` as JSON, and return the path."""
        path = Path(path)
        path.write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return path

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page that opens without a network, and return the path."""
        from flatminima.report import write_html

        return write_html(self, path)

    @classmethod
    def from_json(cls, path: str | Path) -> Audit:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: If the file is not an audit of this schema.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not JSON: {error}.") from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"{path} must be an audit of schema {SCHEMA}. Got {found!r}.")
        try:
            return _audit(data)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a whole audit of schema {SCHEMA}: {error}.") from error


def _audit(data: dict[str, Any]) -> Audit:
    minimum, spectrum = data["minimum"], data["spectrum"]
    reference = minimum.pop("reference_loss") if minimum else None
    return Audit(
        **{
            **data,
            "minimum": MinimumCheck(**_known(minimum), reference_loss=reference) if minimum else None,
            "spectrum": Spectrum(**{k: tuple(v) for k, v in spectrum.items()}) if spectrum else None,
            "symmetries": tuple(SymmetryRecord(**_known(record)) for record in data["symmetries"]),
            "rows": tuple(_row(row) for row in data["rows"]),
            "notes": tuple(data["notes"]),
        }
    )


def _known(data: dict[str, Any]) -> dict[str, Any]:
    """Return numbers that JSON could not hold as NaN."""
    return {key: math.nan if value is None else value for key, value in data.items()}


def _row(data: dict[str, Any]) -> Row:
    attacks = tuple(
        Attack(**{**a, "readings": tuple(_reading(r) for r in a["readings"]), "folds": tuple(a["folds"])})
        for a in data["attacks"]
    )
    canonical = _reading(data["canonical"]) if data["canonical"] else None
    return Row(**{**data, "base": _reading(data["base"]), "attacks": attacks, "canonical": canonical})


def _reading(data: dict[str, Any]) -> Reading:
    return Reading(**{**data, "interval": tuple(data["interval"]) if data["interval"] else None})


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_finite(item) for item in value]
    return value
