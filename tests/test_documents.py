"""What the documents state in words, held to what the code says. Their examples are executed by the root's conftest.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flatminima import measures

_ROOT = Path(__file__).parents[1]
_CONCEPTS = (_ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
_DOCUMENTS = sorted([*_ROOT.glob("*.md"), *(_ROOT / "docs").rglob("*.md"), *(_ROOT / "benchmarks").glob("*.md")])


def _table_of_measures() -> dict[str, dict[str, bool]]:
    """Return, for each measure in the table of docs/concepts.md, what the table says of each kind of symmetry."""
    section = _CONCEPTS.split("## The measures")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    kinds = rows[0][2:]
    return {row[0].strip("`"): {k: v == "yes" for k, v in zip(kinds, row[2:], strict=True)} for row in rows[2:]}


def test_the_table_names_every_measure() -> None:
    assert list(_table_of_measures()) == list(measures.available())


@pytest.mark.parametrize("key", measures.available())
def test_the_table_says_what_the_measure_declares(key: str) -> None:
    assert _table_of_measures()[key] == dict(measures.get(key).invariances)


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda path: str(path.relative_to(_ROOT)))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for link, _, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(#([^)]*))?\)", document.read_text(encoding="utf-8")):
        target = (document.parent / link) if link else document
        assert target.exists(), f"{document.name} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
