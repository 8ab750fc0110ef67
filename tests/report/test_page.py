"""The page as text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import matplotlib as mpl
import pytest

from flatminima.report import write_html
from flatminima.report.page import render
from tests import example_audits

_LIMIT = 1_000_000


class _Outline(HTMLParser):
    """Collects ids, references and tags, and sees that every tag is closed."""

    _VOID = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: set[str] = set()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self._VOID:
            self._open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("aria-labelledby", "aria-describedby"):
                self.references.update((value or "").split())
            elif name in ("href", "src", "xlink:href"):
                self.addresses.append(value or "")
            self.references.update(re.findall(r"url\(#([^)]+)\)", value or ""))
        self.references.update(address[1:] for address in self.addresses if address.startswith("#"))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self._VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def close(self) -> None:
        super().close()
        assert self._open == []


def _outline(path: Path) -> _Outline:
    outline = _Outline()
    outline.feed(path.read_text(encoding="utf-8"))
    outline.close()
    return outline


@pytest.mark.parametrize("name", ["realistic", "odd", "empty", "untested"])
def test_tags_close_ids_are_unique_and_references_lead_somewhere(pages: dict[str, Path], name: str) -> None:
    outline = _outline(pages[name])
    assert len(outline.ids) == len(set(outline.ids))
    assert outline.references <= set(outline.ids)


@pytest.mark.parametrize("name", ["realistic", "odd", "empty", "untested"])
def test_a_page_names_no_address_outside_itself(pages: dict[str, Path], name: str) -> None:
    outline = _outline(pages[name])
    assert all(address.startswith(("#", "data:")) for address in outline.addresses)
    assert outline.tags.count("script") == 2


@pytest.mark.parametrize("name", ["realistic", "odd", "empty", "untested"])
def test_a_page_is_under_a_megabyte(pages: dict[str, Path], name: str) -> None:
    assert pages[name].stat().st_size < _LIMIT


def test_the_embedded_json_is_the_audit_and_cannot_end_its_element() -> None:
    audit = example_audits.odd()
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', render(audit), flags=re.DOTALL)
    assert json.loads(block) == json.loads(json.dumps(audit.to_dict()))
    assert "<" not in block


def test_every_fold_change_stands_beside_its_declaration() -> None:
    audit = example_audits.realistic()
    page = render(audit)
    declared = [attack.declared_invariant for row in audit.rows for attack in row.attacks]
    assert page.count("declared invariant</small>") == declared.count(True)
    assert page.count("declared variant</small>") == declared.count(False)


def test_hostile_text_appears_only_escaped() -> None:
    text = render(example_audits.odd())
    assert "<script>document" not in text
    assert "<img" not in text
    assert "&lt;/script&gt;&lt;script&gt;document" in text


def test_a_partial_audit_says_so_on_top_and_a_whole_one_does_not() -> None:
    partial = render(example_audits.realistic(complete=False))
    assert partial.index("Partial report") < partial.index("<h1")
    assert "Partial report" not in render(example_audits.realistic())


def test_the_page_says_how_to_repeat_the_audit() -> None:
    text = render(example_audits.realistic())
    assert "flatminima audit digits-mlp --out report" in text
    assert "HessianTrace(rtol=0.02)" in text
    assert "torch: 2.13.0+cpu" in text


def test_the_same_audit_gives_the_same_page() -> None:
    assert render(example_audits.realistic()) == render(example_audits.realistic())


def test_rendering_leaves_matplotlib_as_it_was() -> None:
    before = dict(mpl.rcParams)
    render(example_audits.odd())
    assert dict(mpl.rcParams) == before


def test_an_audit_writes_itself(tmp_path: Path) -> None:
    path = example_audits.realistic().to_html(tmp_path / "page.html")
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_an_audit_that_went_through_json_gives_a_page(tmp_path: Path) -> None:
    audit = example_audits.odd()
    back = type(audit).from_json(audit.to_json(tmp_path / "audit.json"))
    assert "Defective" in render(back)


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = write_html(example_audits.realistic(), tmp_path / "page.html")
    before = page.read_bytes()

    def full(*_arguments: object, **_options: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_html(example_audits.odd(), page)
    assert page.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
