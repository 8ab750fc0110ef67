from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import same_color, to_rgba
from matplotlib.figure import Figure

from flatminima import plots
from flatminima.plots.style import ALARM, look
from flatminima.trust import Attack
from tests import example_audits


def _png(ax: Axes) -> bytes:
    assert isinstance(ax.figure, Figure)
    buffer = io.BytesIO()
    ax.figure.savefig(buffer, format="png")
    return buffer.getvalue()


def test_the_axes_given_are_the_axes_returned() -> None:
    ax = Figure().add_subplot()
    assert plots.fold_changes(example_audits.realistic(), ax) is ax
    assert plots.spectrum(example_audits.realistic(), ax) is ax


def test_the_most_moved_measure_is_on_top() -> None:
    ax = plots.fold_changes(example_audits.realistic())
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names[:3] == ["Hessian trace", "Frobenius norm", "Largest eigenvalue"]
    assert ax.yaxis_inverted()


def test_every_move_is_drawn_where_its_factor_is() -> None:
    audit = example_audits.realistic()
    ax = plots.fold_changes(audit)
    drawn = sorted(x for line in ax.lines if line.get_markersize() < 3 for x in line.get_xdata())
    assert drawn == pytest.approx(sorted(f for row in audit.rows for attack in row.attacks for f in attack.folds))


def test_declared_invariance_is_a_filled_marker() -> None:
    audit = example_audits.realistic()
    row = audit.rows[0]
    attacks = (Attack("node", True, row.attacks[1].readings, (4.0,), "defect"), replace(row.attacks[0], declared_invariant=False))
    ax = plots.fold_changes(replace(audit, rows=(replace(row, attacks=attacks),)))
    large = {line.get_xdata()[0]: line for line in ax.lines if line.get_markersize() > 6}
    assert same_color(large[4.0].get_markerfacecolor(), look("node", ["node"]).colour)
    assert to_rgba(large[18.2].get_markerfacecolor())[3] == 0
    (text,) = [text for text in ax.texts if "defect" in text.get_text()]
    assert same_color(text.get_color(), ALARM)


def test_the_scale_is_logarithmic_and_labels_have_the_number_of_moves() -> None:
    ax = plots.fold_changes(example_audits.realistic())
    assert ax.get_xscale() == "log"
    assert "3 moves a symmetry, log scale" in ax.get_xlabel()
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()][-2:] == ["declared unchanged", "declared to change"]


def test_a_factor_that_is_none_stands_at_the_edge_with_the_reason() -> None:
    texts = {text.get_text() for text in plots.fold_changes(example_audits.odd()).texts}
    assert {"changes sign", "×∞", "×4, defect", "no value"} <= texts


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")
def test_odd_audits_are_drawn() -> None:
    for audit in (example_audits.odd(), example_audits.empty(), example_audits.without_symmetries()):
        for ax in (plots.fold_changes(audit), plots.fold_changes(audit, names="above"), plots.spectrum(audit)):
            assert _png(ax).startswith(b"\x89PNG")


def test_nothing_to_draw_is_said() -> None:
    assert "no symmetry was found" in plots.fold_changes(example_audits.without_symmetries()).texts[0].get_text()
    assert "not computed" in plots.spectrum(example_audits.empty()).texts[0].get_text()


def test_names_above_their_lines_need_no_room_at_the_left() -> None:
    ax = plots.fold_changes(example_audits.realistic(), names="above")
    assert list(ax.get_yticks()) == []
    assert "Hessian trace" in {text.get_text() for text in ax.texts}


def test_kinds_have_colours_and_markers_of_their_own_also_those_that_are_not_known() -> None:
    kinds = [*example_audits.KINDS, "attention GL", "sign"]
    looks = [look(kind, kinds) for kind in kinds]
    assert len({entry.colour for entry in looks}) == len({entry.marker for entry in looks}) == len(kinds)


def test_series_differ_in_grey_or_in_marker_and_are_far_apart_for_deuteranopes() -> None:
    # Viénot, Brettel & Mollon (1999) for deuteranopia, in linear RGB.
    simulate = np.array([[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]])
    seen = [np.array(to_rgba(look(kind, []).colour)[:3]) ** 2.2 @ simulate.T for kind in example_audits.KINDS]
    seen = [np.clip(colour, 0, 1) ** (1 / 2.2) for colour in seen]
    gaps = [np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i]]
    assert min(gaps) > 0.08


def test_plots_touch_neither_pyplot_nor_settings() -> None:
    before = dict(mpl.rcParams)
    plots.fold_changes(example_audits.realistic())
    plots.spectrum(example_audits.realistic())
    assert dict(mpl.rcParams) == before
    code = "import sys, flatminima.plots; print('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
