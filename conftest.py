"""Executes the examples in README.md and docs/: blocks of Python, and the commands in blocks of bash.

The examples of one document run in order, in one temporary folder and one namespace. A block of Python whose first line is
``# name.py`` is saved there under that name as well, so that later commands find it. Commands that install or that run these
checks (``make``, ``pip``) are not executed here; tests/test_commands.py holds them to what they say.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

_NOT_HERE = ("make", "pip")
_SECONDS = 300


class _Python(PythonEvaluator):
    def __call__(self, example: Example) -> None:
        source = str(example.parsed)
        if name := re.match(r"# (\w+\.py)\n", source):
            Path(name[1]).write_text(source, encoding="utf-8")
        super().__call__(example)


def _bash(example: Example) -> str | None:
    for line in str(example.parsed).splitlines():
        command = shlex.split(line, comments=True)
        if not command or command[0] in _NOT_HERE:
            continue
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            command, env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS
        )
        if done.returncode != 0:
            return f"{line}\nended with status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return None


def _enter_folder(namespace: dict[str, Any]) -> None:
    namespace["__folder"] = (tempfile.TemporaryDirectory(), Path.cwd())
    os.chdir(namespace["__folder"][0].name)


def _leave_folder(namespace: dict[str, Any]) -> None:
    folder, before = namespace["__folder"]
    os.chdir(before)
    folder.cleanup()


pytest_collect_file = Sybil(
    parsers=[CodeBlockParser("python", _Python()), CodeBlockParser("bash", _bash)],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
    setup=_enter_folder,
    teardown=_leave_folder,
).pytest()
