from __future__ import annotations

import math

import pytest

from flatminima.plots import spectrum
from flatminima.trust import Spectrum
from tests import example_audits


def test_an_audit_and_its_spectrum_give_the_same_drawing() -> None:
    audit = example_audits.realistic()
    assert audit.spectrum is not None
    ends = [[list(line.get_ydata()) for line in spectrum(source).lines] for source in (audit, audit.spectrum)]
    assert ends[0] == ends[1]


def test_every_eigenvalue_stands_at_its_height_with_its_residual() -> None:
    found = Spectrum(largest=(5.0, 3.0), smallest=(-1.0,), residuals=(0.5, 0.25, 0.125))
    ax = spectrum(found)
    points = {tuple(line.get_ydata()) for line in ax.lines if line.get_marker() in ("o", "s")}
    assert points == {(5.0, 3.0), (-1.0,)}
    bars = [segment for collection in ax.collections for segment in collection.get_segments()]
    heights = sorted(abs(segment[1][1] - segment[0][1]) for segment in bars)
    assert heights == pytest.approx(sorted([5.0, 3.0, 1.0, 2 * 0.5, 2 * 0.25, 2 * 0.125]))


def test_the_number_of_eigenvalues_and_the_largest_and_smallest_are_written() -> None:
    ax = spectrum(example_audits.realistic())
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["10 largest", "3 smallest"]
    assert {text.get_text() for text in ax.texts} == {"31.4", "−0.00310"}
    assert [label.get_text() for label in ax.get_xticklabels()][-1] == "n"


@pytest.mark.parametrize(
    "found",
    [
        Spectrum((1.0,), (), (0.0,)),
        Spectrum((), (1.0,), ()),
        Spectrum((math.nan, 1.0), (-math.inf,), (math.nan, 0.0, 0.0)),
        Spectrum((0.0, 0.0), (0.0,), (0.0, 0.0, 0.0)),
        Spectrum(tuple(float(40 - i) for i in range(40)), (1e-9,), (0.0,) * 41),
    ],
)
def test_odd_spectra_are_drawn(found: Spectrum) -> None:
    ax = spectrum(found)
    ax.figure.draw_without_rendering()  # type: ignore[union-attr]
    assert len(ax.get_xticklabels()) <= 20
