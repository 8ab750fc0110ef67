"""The names that the package offers, and that each is found only when it is asked for."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import flatminima


def test_every_name_of_all_is_there() -> None:
    missing = [name for name in flatminima.__all__ if not hasattr(flatminima, name)]
    assert missing == []
    assert set(flatminima.__all__) <= set(dir(flatminima))


def test_type_checkers_see_the_names_that_the_interpreter_finds() -> None:
    tree = ast.parse(Path(flatminima.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module.removeprefix("flatminima").removeprefix(".")
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert set(seen) | {"__version__"} == set(flatminima.__all__)
    assert {name: home for name, home in seen.items() if home} == flatminima._HOME_OF


def test_the_version_is_that_of_the_installed_distribution() -> None:
    assert flatminima.__version__ == importlib.metadata.version("flatminima")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'flatminima' has no attribute 'no_such_name'"):
        flatminima.no_such_name  # noqa: B018


def test_importing_the_package_does_not_import_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, flatminima; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"
