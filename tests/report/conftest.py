from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flatminima.report import write_html
from flatminima.trust import Audit
from tests import example_audits
from tests.report.browser import Browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of every example, by the example's name."""
    folder = tmp_path_factory.mktemp("pages")
    audits: dict[str, Audit] = {
        "realistic": example_audits.realistic(),
        "odd": example_audits.odd(),
        "empty": example_audits.empty(),
        "untested": example_audits.without_symmetries(),
    }
    return {name: write_html(audit, folder / f"{name}.html") for name, audit in audits.items()}
