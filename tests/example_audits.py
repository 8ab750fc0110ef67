"""Audits made by hand, with the numbers of a real one and with the odd ones that a real one seldom has."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from flatminima.trust import Attack, Audit, MinimumCheck, Reading, Row, Spectrum, SymmetryRecord

_FINITE = ("permutation", "softmax shift")
KINDS = ("layer", "node", "permutation", "norm-scale", "softmax shift")
HOSTILE = "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">'\"&{{7*7}}[bold]$x_"

_MEANING = "What the number says, in one sentence for a newcomer."


def reading(value: float | None, stderr: float = 0.0, **more: Any) -> Reading:
    return Reading(value, stderr, num_products=12, num_gradients=3, num_losses=2, seconds=0.4, **more)


def attack(kind: str, base: float, folds: tuple[float | None, ...], declared: bool, verdict: str = "") -> Attack:
    """An attack whose readings are the base value times the folds (with the sign changed where a fold is None)."""
    moved = any(fold is None or abs(fold - 1) > 1e-6 for fold in folds)
    verdict = verdict or (("defect" if declared else "moves") if moved else "survives")
    return Attack(kind, declared, tuple(reading(-base if f is None else base * f) for f in folds), folds, verdict)


def row(
    name: str, base: float, folds: dict[str, float | None], *, invariant: tuple[str, ...], stderr: float = 0.0, **details: float
) -> Row:
    attacks = tuple(
        attack(kind, base, (1.0 + ((fold or 1.0) - 1.0) / 3, 1.0 + ((fold or 1.0) - 1.0) / 9, fold), kind in invariant)
        for kind, fold in folds.items()
    )
    verdicts = [a.verdict for a in attacks]
    verdict = next((v for v in ("failed", "defect", "moves") if v in verdicts), "survives")
    method = "hutchinson" if stderr else "exact"
    return Row(
        f"{name.title().replace(' ', '')}(rtol=0.02)",
        name.lower().replace(" ", "-"),
        "Author et al. 2020, eq. 3",
        "max_{‖δ‖≤ε} (L(θ+δ) − L(θ)) / (1 + L(θ))",
        _MEANING,
        reading(base, stderr, method=method, details=details),
        attacks,
        reading(base * 0.31, stderr * 0.31),
        verdict,
        title=name,
    )


def realistic(**changes: Any) -> Audit:
    """What an audit of a small network with BatchNorm-free ReLU layers looks like."""
    same = dict.fromkeys(("layer", "node", "permutation", "softmax shift"), 1.0)
    rows = (
        row("Largest eigenvalue", 31.42, {**same, "layer": 18.2, "node": 412.0}, invariant=_FINITE),
        row("Hessian trace", 214.0, {**same, "layer": 33.1, "node": 1.9e4}, invariant=_FINITE, stderr=2.1),
        row("Frobenius norm", 51.9, {**same, "layer": 21.0, "node": 890.0}, invariant=_FINITE, stderr=0.8),
        row(
            "ε-sharpness (ε=0.01)",
            1.61e-3,
            {**same, "layer": 14.9, "node": 207.0},
            invariant=_FINITE,
            first_order=9.1e-5,
            second_order=1.57e-3,
            gap=1e-7,
        ),
        row(
            "Adaptive average sharpness (ρ=0.1)",
            0.0213,
            {**same, "node": 1.0},
            invariant=KINDS,
            stderr=4e-4,
            first_order=0.0,
            second_order=0.0201,
        ),
        row("Minimum sharpness (layers)", 148.0, {**same, "node": 9.3}, invariant=("layer", "permutation", "softmax shift")),
        row("Node-wise minimum sharpness", 66.4, same, invariant=KINDS),
        row("Normalized sharpness", 12.8, same, invariant=KINDS),
        row("Fisher–Rao norm", 0.0417, same, invariant=KINDS),
        row("Radial curvature θᵀHθ", 0.0409, same, invariant=KINDS),
        row("Squared norm Σ‖W‖²", 318.2, {**same, "layer": 7.7, "node": 95.0, "softmax shift": 1.3}, invariant=("permutation",)),
    )
    audit = Audit(
        target="digits-mlp",
        complete=True,
        num_parameters=3466,
        num_examples=1347,
        loss_name="cross_entropy",
        minimum=MinimumCheck(
            loss=1.93e-3,
            gradient_norm=2.4e-4,
            smallest_eigenvalue=-3.1e-3,
            smallest_residual=2e-6,
            largest_eigenvalue=31.42,
            noise=1e-5,
            verdict="minimum",
            reference_loss=2.31,
            expected_fall=1.93e-3,
        ),
        spectrum=Spectrum(
            largest=(31.42, 22.7, 18.1, 14.4, 9.6, 7.2, 5.9, 4.1, 2.2, 1.1),
            smallest=(-2.1e-4, -8.8e-4, -3.1e-3),
            residuals=(1e-6,) * 13,
        ),
        symmetries=(
            SymmetryRecord("layer", 2, "rescaling of 2 hidden layers, what reads them divided by the same", 3, 3.1e-15),
            SymmetryRecord("node", 64, "rescaling of 64 hidden units, what reads them divided by the same", 3, 8.9e-15),
            SymmetryRecord("permutation", 0, "reordering of 64 hidden units in 2 sets", 3, 1.2e-15),
            SymmetryRecord("softmax shift", 33, "one vector added to every class row of the last layer", 3, 2.2e-15),
        ),
        rows=rows,
        notes=("Dead units: 3 of 64 never fire on these data; their scale is free and was left as it is.",),
        settings={
            "seed": 0,
            "num_moves": 3,
            "scale": 1.0,
            "dtype": "float64",
            "measures": ["LargestEigenvalue(rtol=1e-05)", "HessianTrace(rtol=0.02)"],
            "versions": {"flatminima": "0.1.0", "torch": "2.13.0+cpu"},
        },
        command="flatminima audit digits-mlp --out report",
        seconds=41.7,
        created="2026-03-04T05:06:07+00:00",
    )
    return replace(audit, **changes)


def odd() -> Audit:
    """Everything that is rare at once: hostile and long names, missing values, failures, infinities, NaN, sign changes."""
    base = realistic()
    long = "Sharpness of a very long name that nobody would choose " * 4
    rows = (
        replace(base.rows[0], name=HOSTILE, title=HOSTILE, key=HOSTILE, meaning=HOSTILE, formula=HOSTILE, source=HOSTILE),
        replace(base.rows[1], name=long, title=long, key="long"),
        replace(base.rows[2], title="锐度 — ñandú Σ∂²", key="unicode"),
        _failed(base.rows[3]),
        replace(
            base.rows[4], title="Sign changes", key="sign", attacks=(attack("layer", 2.0, (3.0, None), False),), canonical=None
        ),
        replace(
            base.rows[5], title="Infinite", key="inf", attacks=(attack("node", 1.0, (math.inf, 5.0), False),), verdict="moves"
        ),
        replace(base.rows[6], title="Defective", key="bad", attacks=(attack("node", 1.0, (4.0, 2.0), True),), verdict="defect"),
        replace(base.rows[7], title="Not a number", key="nan", base=reading(math.nan), attacks=(), canonical=None),
        replace(base.rows[8], title="Zero", key="zero", base=reading(0.0), attacks=(attack("layer", 0.0, (1.0,), True),)),
        replace(base.rows[9], title="Negative", key="negative", base=reading(-1.5e-9, 2e-10), attacks=()),
    )
    minimum = MinimumCheck(math.inf, math.nan, -2.0, 0.5, 1e9, 1e-3, f"No minimum: {HOSTILE}", None, math.inf)
    symmetries = (SymmetryRecord(HOSTILE, 3, HOSTILE, 3, math.nan), *base.symmetries)
    return replace(
        base,
        target=HOSTILE,
        loss_name=HOSTILE,
        rows=rows,
        minimum=minimum,
        symmetries=symmetries,
        notes=(HOSTILE, ""),
        command=f"flatminima audit '{HOSTILE}'",
        settings={HOSTILE: HOSTILE, "nested": {"a": [1, {"b": HOSTILE}]}, "none": None},
        complete=False,
    )


def empty() -> Audit:
    """An audit that was stopped before anything was measured, of a network without symmetries."""
    return realistic(complete=False, minimum=None, spectrum=None, symmetries=(), rows=(), notes=(), settings={}, command="")


def without_symmetries() -> Audit:
    """What a tanh network gives: numbers, but nothing to test them with."""
    base = realistic()
    return replace(base, symmetries=(), rows=tuple(replace(r, attacks=(), canonical=None, verdict="survives") for r in base.rows))


def _failed(row: Row) -> Row:
    why = "NotSupported: the third derivative is not available through LayerNorm."
    nothing = Reading(None, error=why)
    attacks = tuple(Attack(a.symmetry, a.declared_invariant, (nothing,) * 3, (None,) * 3, "failed") for a in row.attacks)
    return replace(row, title="Failed", key="failed", base=nothing, attacks=attacks, canonical=nothing, verdict="failed")
