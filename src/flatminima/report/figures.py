"""Drawings as inline SVG in the page's own colours.

Matplotlib writes colours and fonts as fixed values. Here they become the page's CSS variables, so that a drawing follows the
light and the dark scheme; names of parts are made unique in the page, and text stays text.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flatminima.plots import style

__all__ = ["Drawing", "draw"]

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
# The style sheet in a drawing would be the whole page's; what it says stands on the root instead.
_DROPPED = {f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"}
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "flatminima",
    "font.family": "DejaVu Sans",
    "font.size": 10.0,
    "text.parse_math": False,  # a name with dollar signs is not a formula
}
_VARIABLES = {
    style.INK: "--ink",
    style.MUTED: "--muted",
    style.GRID: "--grid",
    style.ALARM: "--alarm",
    **{look.colour: f"--series-{index}" for index, look in enumerate(style.ALL_LOOKS)},
}


@dataclass(frozen=True)
class Drawing:
    """An SVG element.

    Attributes:
        svg: The markup.
        width: Natural width in CSS pixels.
        title: What it shows, for those who do not see it.
    """

    svg: Markup
    width: int
    title: str


def draw(name: str, title: str, size: tuple[float, float], function: Callable[[Axes], object]) -> Drawing:
    """Draw with a function that takes axes.

    Args:
        name: Prefix of the ids inside the drawing, unique in the page.
        title: What the drawing shows.
        size: Width and height in inches, at 96 CSS pixels an inch.
        function: Draws on the axes.
    """
    buffer = io.BytesIO()
    with mpl.rc_context(_SETTINGS), warnings.catch_warnings():
        # The browser has fonts for names that matplotlib's font has no glyphs for.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=size, layout="constrained", facecolor="none")
        axes = figure.add_subplot(facecolor="none")
        function(axes)
        figure.savefig(
            buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True, bbox_inches="tight", pad_inches=0.02
        )
    return Drawing(_themed(buffer.getvalue(), name, title), round(size[0] * 96), title)


def _themed(source: bytes, name: str, title: str) -> Markup:
    root = ElementTree.fromstring(source)  # noqa: S314  (what matplotlib wrote a moment ago)
    for parent in root.iter():
        for child in [child for child in parent if child.tag in _DROPPED]:
            parent.remove(child)
    for element in root.iter():
        for key, value in element.attrib.items():
            element.set(key, _attribute(key, value, name))
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("style", "stroke-linejoin: round; stroke-linecap: butt")
    root.set("role", "img")
    root.set("aria-label", title)
    root.set("focusable", "false")
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    return Markup(ElementTree.tostring(root, encoding="unicode"))  # noqa: S704  (text is escaped by the serialiser)


def _attribute(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key in (f"{{{_XLINK}}}href", "href"):
        return value.replace("#", f"#{name}-", 1)
    value = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", value)
    if key in ("style", "fill", "stroke"):
        value = re.sub(r"#[0-9a-f]{6}", lambda match: _variable(match[0]), value)
        value = re.sub(r"(font: [^']*)'DejaVu Sans'[^;]*", r"\1var(--sans)", value)
    return value


def _variable(colour: str) -> str:
    return f"var({_VARIABLES[colour]})" if colour in _VARIABLES else colour
