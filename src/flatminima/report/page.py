"""The page: context, templates, and the one file that comes out."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flatminima import plots
from flatminima.plots.numbers import number, typeset
from flatminima.report.figures import Drawing, draw
from flatminima.report.files import replacing
from flatminima.report.view import flat_settings, parts, table
from flatminima.report.words import VERDICTS, findings, headline, outputs_agree
from flatminima.trust import Audit

__all__ = ["render", "write_html"]

_STYLES = ("theme.css", "page.css", "table.css")
_SCRIPTS = ("tooltip.js", "table.js", "save.js")


def write_html(audit: Audit, path: str | Path) -> Path:
    """Write one self-contained page about an audit; it opens without a network.

    Args:
        audit: What to show. One that was interrupted says so on top.
        path: The file; it appears whole or not at all.

    Returns:
        The path.

    Raises:
        OSError: If the file cannot be written.
    """
    path = Path(path)
    text = render(audit)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def render(audit: Audit) -> str:
    """Return the page about an audit as HTML."""
    script = Markup("\n".join(_static(name) for name in _SCRIPTS))  # noqa: S704  (package data)
    style = Markup("\n".join(_static(name) for name in _STYLES))  # noqa: S704
    return _environment().get_template("audit.html").render(
        audit=audit,
        headline=headline(audit),
        findings=findings(audit),
        outputs_agree=outputs_agree(audit),
        table=table(audit),
        verdicts=VERDICTS,
        parts=parts(audit),
        settings=flat_settings(audit.settings),
        folds=_fold_drawings(audit),
        spectra=_spectrum_drawings(audit),
        data=_embedded(audit.to_dict()),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )  # fmt: skip


def _fold_drawings(audit: Audit) -> list[Drawing]:
    """Return the drawing for a wide and for a narrow screen."""
    count = sum(bool(row.attacks) for row in audit.rows)
    if not count:
        return []
    title = "Fold change of every measure under every kind of symmetry; the numbers are those of the trust table."
    return [
        draw("folds-wide", title, (7.6, 1.5 + 0.4 * max(count, 3)), lambda ax: plots.fold_changes(audit, ax)),
        draw("folds-narrow", title, (3.9, 1.7 + 0.6 * max(count, 3)), lambda ax: plots.fold_changes(audit, ax, names="above")),
    ]


def _spectrum_drawings(audit: Audit) -> list[Drawing]:
    found = audit.spectrum
    if found is None:
        return []
    values = ", ".join(number(value) for value in (*found.largest, *found.smallest))
    title = f"Eigenvalues of the Hessian, from the largest: {values}."
    return [
        draw("spectrum-wide", title, (7.6, 3.4), lambda ax: plots.spectrum(found, ax)),
        draw("spectrum-narrow", title, (3.9, 3.0), lambda ax: plots.spectrum(found, ax)),
    ]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("flatminima.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = lambda value, digits=3: typeset(number(value, digits))
    return environment


@cache
def _static(name: str) -> str:
    return (files("flatminima.report") / "static" / name).read_text(encoding="utf-8")


def _embedded(data: dict[str, Any]) -> Markup:
    """Return the data as JSON that can stand in a script element: no ``<`` can end it early."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704  (what could end the element was replaced)


def _hash(source: str) -> str:
    """Return the digest by which the page's own security policy lets this style or script through, and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
