"""The audit: what it finds, what it leaves alone, how it fails."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import flatminima as fm
from flatminima.measures.base import Measure, invariant_to

DETERMINISTIC = ("hessian-trace", "minimum-sharpness", "nodewise-minimum-sharpness", "fisher-rao", "squared-norm")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def objective(activation: type[nn.Module] = nn.ReLU, **settings: Any) -> fm.Objective:
    g = generator(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), activation(), nn.Linear(6, 5), activation(), nn.Linear(5, 3))
    x, y = torch.randn(40, 4, generator=g), torch.randint(0, 3, (40,), generator=g)
    return fm.Objective(model, F.cross_entropy, [(x[:30], y[:30]), (x[30:], y[30:])], **settings)


def test_an_audit_tells_survivors_from_movers_while_the_outputs_stay() -> None:
    audit = fm.audit(objective(), generator=generator())
    assert audit.complete
    assert [s.kind for s in audit.symmetries] == ["layer", "node", "permutation", "softmax shift"]
    assert all(s.max_output_difference <= 1e-10 and s.num_moves == 3 for s in audit.symmetries)
    verdicts = {row.key: row.verdict for row in audit.rows}
    movers = {"largest-eigenvalue", "hessian-trace", "frobenius-norm", "epsilon-sharpness", "minimum-sharpness", "squared-norm"}
    assert {key for key, verdict in verdicts.items() if verdict == "moves"} == movers
    assert {key for key, verdict in verdicts.items() if verdict == "survives"} == set(verdicts) - movers
    assert set(verdicts) == set(fm.measures.available())
    assert audit.num_products > 0
    assert audit.num_gradients > 0
    assert audit.num_losses > 0
    assert audit.settings["canonical_form"] == "min-trace"
    by_key = {row.key: row for row in audit.rows}
    least = by_key["nodewise-minimum-sharpness"].base.value
    assert by_key["hessian-trace"].canonical is not None
    assert by_key["hessian-trace"].canonical.value == pytest.approx(least, rel=1e-6)
    parts = by_key["epsilon-sharpness"].base.details
    assert {"first_order", "second_order"} <= set(parts)


def test_an_audit_repeats_exactly_under_a_seed_and_leaves_the_global_generator() -> None:
    state = torch.get_rng_state()
    first, second = (fm.audit(objective(), measures=DETERMINISTIC, generator=generator(3)).to_dict() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert _without_time(first) == _without_time(second)
    other = fm.audit(objective(), measures=DETERMINISTIC, generator=generator(4)).to_dict()
    assert _without_time(first)["rows"] != _without_time(other)["rows"]


def _without_time(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_time(v) for k, v in value.items() if k not in ("seconds", "created")}
    return [_without_time(v) for v in value] if isinstance(value, list) else value


def test_an_audit_leaves_the_model_as_it_was() -> None:
    target = objective()
    target.model.train()
    before = {n: t.clone() for n, t in target.model.state_dict().items()}
    fm.audit(target, measures=DETERMINISTIC, generator=generator())
    assert all(m.training for m in target.model.modules())
    assert all(torch.equal(t, before[n]) for n, t in target.model.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in target.model.parameters())


def test_an_audit_goes_to_json_and_back(tmp_path: Path) -> None:
    audit = fm.audit(objective(), measures=["fisher-rao", "hessian-trace"], num_moves=1, generator=generator())
    path = audit.to_json(tmp_path / "report.json")
    assert fm.Audit.from_json(path) == fm.Audit.from_json(path)
    assert fm.Audit.from_json(path).to_dict() == audit.to_dict()
    assert json.loads(path.read_text(encoding="utf-8"))["schema"] == "flatminima.audit/1"
    odd = replace(audit, rows=(replace(audit.rows[0], base=replace(audit.rows[0].base, value=float("nan"))),))
    odd.to_json(path)
    assert fm.Audit.from_json(path).rows[0].base.value is None
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "must be an audit of schema"),
        ('{"schema": "flatminima.audit/1"}', "not a whole"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            fm.Audit.from_json(path)


@dataclass(frozen=True)
class Boastful(Measure):
    """Claims an invariance that the trace does not have."""

    key, title, source, formula, meaning, cost = "boastful", "Boastful", "", "", "", ""

    @property
    def invariances(self) -> Mapping[str, bool]:
        return invariant_to("layer", "permutation")

    def _measure(self, objective: fm.Objective, generator: torch.Generator | None) -> fm.Estimate:
        return fm.measures.HessianTrace()(objective, generator=generator)


@dataclass(frozen=True)
class Failing(Boastful):
    """Cannot be computed away from the given point."""

    home: float = 0.0

    def _measure(self, objective: fm.Objective, generator: torch.Generator | None) -> fm.Estimate:
        if self.home == 0.0 or float(objective.theta.sum()) != self.home:
            raise fm.NotSupported("not for this network\nsecond line")
        return fm.Estimate.exact(1.0)


def test_a_measure_that_moves_against_its_word_is_a_defect() -> None:
    row = fm.audit(objective(), measures=[Boastful()], generator=generator()).rows[0]
    assert {a.symmetry: a.verdict for a in row.attacks} == {
        "layer": "defect", "node": "moves", "permutation": "survives", "softmax shift": "survives",
    }  # fmt: skip
    assert row.verdict == "defect"


def test_a_measure_that_fails_is_a_row_and_no_exception() -> None:
    target = objective(dtype=torch.float64)
    always, elsewhere = fm.audit(
        target, measures=[Failing(), Failing(home=float(target.theta.sum()))], num_moves=1, generator=generator()
    ).rows
    assert (always.verdict, always.base.value, always.base.error) == ("failed", None, "not for this network")
    assert always.attacks == ()
    assert elsewhere.base.value == 1.0
    assert elsewhere.verdict == "failed"


def test_an_interrupted_audit_has_handed_over_what_it_had() -> None:
    seen: list[fm.Audit] = []

    def interrupt(done: int, total: int | None, message: str) -> None:
        if message.startswith("Hessian trace: node"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fm.audit(
            objective(),
            measures=["fisher-rao", "hessian-trace"],
            generator=generator(),
            progress=interrupt,
            on_update=seen.append,
        )
    assert not seen[-1].complete
    assert [row.key for row in seen[-1].rows] == ["fisher-rao"]
    assert seen[-1].minimum is not None


def test_progress_counts_up_to_its_total() -> None:
    calls: list[tuple[int, int | None]] = []
    fm.audit(
        objective(), measures=["fisher-rao"], num_moves=2, generator=generator(), progress=lambda d, t, m: calls.append((d, t))
    )
    assert [d for d, _ in calls] == sorted(d for d, _ in calls)
    assert calls[-1][0] == calls[-1][1]
    assert all(total is not None and done <= total for done, total in calls)


def test_a_tanh_network_is_told_that_it_cannot_be_rescaled() -> None:
    audit = fm.audit(objective(nn.Tanh), measures=["hessian-trace"], generator=generator())
    assert [s.kind for s in audit.symmetries] == ["permutation", "softmax shift"]
    assert any("tanh" in note and "no rescaling" in note for note in audit.notes)
    assert audit.rows[0].verdict == "survives"


def test_a_network_without_symmetries_says_that_nothing_was_tested() -> None:
    target = fm.Objective(nn.Linear(3, 2), F.mse_loss, (torch.ones(4, 3), torch.zeros(4, 2)))
    audit = fm.audit(target, measures=["fisher-rao"], generator=generator())
    assert audit.symmetries == ()
    assert any("stand untested" in note for note in audit.notes)
    assert audit.rows[0].canonical is None


def test_moves_that_move_nothing_test_nothing() -> None:
    audit = fm.audit(objective(), measures=["hessian-trace"], scale=1e-9, num_moves=1, generator=generator())
    assert [s.kind for s in audit.symmetries] == ["permutation"]
    assert sum("is not tested" in note for note in audit.notes) == 3


def test_the_l2_term_counts_for_the_minimum_and_not_for_the_measures() -> None:
    plain = fm.audit(objective(), measures=DETERMINISTIC, num_moves=1, generator=generator())
    decayed = fm.audit(objective(l2=0.1), measures=DETERMINISTIC, num_moves=1, generator=generator())
    assert [r.base.value for r in plain.rows] == [r.base.value for r in decayed.rows]
    assert plain.minimum is not None
    assert decayed.minimum is not None
    assert decayed.minimum.largest_eigenvalue == pytest.approx(plain.minimum.largest_eigenvalue + 0.1, rel=1e-3)


def test_single_precision_is_allowed_its_rounding() -> None:
    audit = fm.audit(objective(), measures=DETERMINISTIC, dtype=None, num_moves=1, generator=generator())
    assert audit.settings["dtype"] == "float32"
    assert not {row.verdict for row in audit.rows} - {"moves", "survives"}


def test_what_cannot_be_audited_is_refused_in_one_line() -> None:
    w = torch.ones(2, requires_grad=True)
    with pytest.raises(fm.NotSupported, match="An audit moves the model"):
        fm.audit(fm.Objective.from_closure(lambda: w.square().sum(), [w]))
    with pytest.raises(ValueError, match=r"Did you mean 'hessian-trace'\?"):
        fm.audit(objective(), measures=["hesian-trace"])
    with pytest.raises(ValueError, match="`num_moves` must be at least 1"):
        fm.audit(objective(), num_moves=0)
    with pytest.raises(TypeError, match=r"`objective` must be a flatminima.Objective"):
        fm.audit(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_digits_mlp_shows_what_the_library_claims() -> None:
    audit = fm.audit(fm.problems.build("digits-mlp").objective(), num_moves=2, generator=generator())
    assert all(s.max_output_difference <= 1e-10 for s in audit.symmetries)
    rows = {row.key: {a.symmetry: a for a in row.attacks} for row in audit.rows}
    for key in ("hessian-trace", "largest-eigenvalue", "frobenius-norm", "epsilon-sharpness"):
        assert max(rows[key][kind].fold or 0 for kind in ("layer", "node")) > 10
    for key in ("nodewise-minimum-sharpness", "fisher-rao", "radial-curvature", "normalized-sharpness", "adaptive-worst"):
        assert all((a.fold or 0) <= 1 + 1e-6 for a in rows[key].values())
    assert all(a.verdict == "survives" for a in rows["adaptive-average"].values())
    assert rows["minimum-sharpness"]["layer"].fold == pytest.approx(1, abs=1e-6)
    assert rows["minimum-sharpness"]["node"].verdict == "moves"


@pytest.mark.parametrize(
    ("measures", "error", "message"),
    [
        ("hessian-trace", ValueError, "must be a list of names or measures.*Got 'hessian-trace'"),
        ([], ValueError, "at least one; None takes all"),
        ([3], TypeError, "Got 3"),
        ([fm.measures.SquaredNorm], TypeError, r"Write SquaredNorm\(\)"),
        (["hessian-trase"], ValueError, "hessian-trace"),
    ],
)
def test_what_is_no_list_of_measures_is_refused_at_once(measures: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fm.audit(objective(), measures=measures)


def test_an_estimated_number_has_its_interval_and_its_samples_in_the_report(tmp_path: Path) -> None:
    audited = fm.audit(objective(), measures=["frobenius-norm", "squared-norm"], num_moves=1, generator=generator())
    (norm, squares) = fm.trust.Audit.from_json(audited.to_json(tmp_path / "report.json")).rows
    assert norm.base.interval is not None
    low, high = norm.base.interval
    assert norm.base.value is not None
    assert norm.base.num_samples is not None
    assert low < norm.base.value < high
    assert (squares.base.interval, squares.base.num_samples) == (None, None)
