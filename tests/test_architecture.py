"""What importing the package and starting the command must not cost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_DRAWING_AND_PAGES = {"matplotlib", "plotly", "jinja2", "rich", "sklearn", "pandas"}


def _modules_after(code: str) -> set[str]:
    """Return the top-level modules that are loaded after the code ran in a fresh interpreter."""
    script = f"{code}\nimport json, sys\nprint('\\n' + json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_loads_no_drawing_or_page_package() -> None:
    loaded = _modules_after("import flatminima")
    assert "flatminima" in loaded
    assert not loaded & _DRAWING_AND_PAGES


def test_using_the_library_loads_no_drawing_or_page_package() -> None:
    loaded = _modules_after(
        "import torch, flatminima as fm\n"
        "model, x, y = torch.nn.Linear(2, 2), torch.ones(3, 2), torch.tensor([0, 1, 1])\n"
        "objective = fm.Objective(model, torch.nn.functional.cross_entropy, [(x, y)])\n"
        "fm.trace(fm.GaussNewton(objective))"
    )
    assert not loaded & _DRAWING_AND_PAGES


@pytest.mark.parametrize("arguments", [["--help"], ["audit", "--help"], ["--version"]])
def test_the_command_answers_without_loading_torch(arguments: list[str]) -> None:
    loaded = _modules_after(
        "import sys\n"
        f"sys.argv = ['flatminima', *{arguments!r}]\n"
        "from flatminima.cli import main\n"
        "try:\n    status = main()\nexcept SystemExit as stop:\n    status = stop.code\n"
        "assert not status, status"
    )
    assert "flatminima" in loaded
    assert not loaded & ({"torch", "numpy", "scipy"} | _DRAWING_AND_PAGES - {"rich"})
