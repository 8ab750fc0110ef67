"""Entry point: run a command, and turn what goes wrong into one line and an exit status."""

from __future__ import annotations

import argparse
import codecs
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TextIO

from flatminima._errors import FlatminimaError
from flatminima.cli.interrupts import ignore, one_at_a_time, put_off
from flatminima.cli.parser import Command, build_parser

__all__ = ["BAD_INPUT", "INTERRUPTED", "UNEXPECTED", "complain", "main"]

UNEXPECTED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; None takes those of the process.

    Returns:
        0, or 2 for bad usage or bad input, 130 when interrupted, 1 for an error that was not foreseen.
    """
    if argv is not None:
        return _answer(list(argv))
    try:
        return _answer(sys.argv[1:])
    finally:
        ignore()  # all is said; an interruption of Python's own shutdown would only print a traceback


def _answer(arguments_given: list[str]) -> int:
    _open_closed_streams()
    _print_anything(sys.stdout)
    _print_anything(sys.stderr)
    arguments = build_parser().parse_args(arguments_given)
    arguments.command_line = arguments_given
    try:
        with one_at_a_time(), warnings.catch_warnings():
            warnings.showwarning = _show_warning
            status = _load(arguments)(arguments)
            sys.stdout.flush()
            return status
    except KeyboardInterrupt:
        complain("interrupted before there was anything to report.")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNEXPECTED
    except (ValueError, TypeError, OSError, FlatminimaError) as error:
        if arguments.debug:
            raise
        complain(_one_line(error))
        return BAD_INPUT
    except Exception as error:
        if arguments.debug:
            raise
        complain(f"unexpected {type(error).__name__}: {_one_line(error)} Run with --debug for the traceback.")
        return UNEXPECTED


def _load(arguments: argparse.Namespace) -> Command:
    """Import a command whole: an interruption in the middle of torch's import can get lost, or leave half of it."""
    with put_off() as interruptions:
        command: Command = arguments.load()
    if interruptions:
        raise KeyboardInterrupt
    return command


def complain(message: str) -> None:
    """Print one line on stderr."""
    print(f"flatminima: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201  (a command prints)


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}." if error.filename is not None else f"{error.strerror}."
    return str(error).strip() or f"{type(error).__name__}."


def _open_closed_streams() -> None:
    """Where the caller has closed stdout or stderr, print to nowhere instead of failing at the first word."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115  (as long as the process)


def _print_anything(stream: TextIO | None) -> None:
    """Spell out what a terminal cannot encode: "±" becomes "+/-", and a number stays that number."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        codecs.register_error("flatminima", _spelt_out)
        reconfigure(errors="flatminima")


_SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_SPELT = {
    "−": "-", "–": "-", "×": "x", "±": "+/-", "…": "...", "·": "*", "∘": "*", "≤": "<=", "√": "sqrt", "Σ": "sum ", "∞": "inf",
    "λ": "lambda", "θ": "theta", "δ": "delta", "ε": "eps", "ρ": "rho", "α": "alpha", "∇": "grad ", "‖": "||", "₂": "2", "²": "^2",
    "ᵀ": "^T", "°": "'", "≈": "~~", "✓": "ok", "↕": "~", "✗": "!", "─": "-", "’": "'",
}  # fmt: skip


def _spelt_out(error: UnicodeError) -> tuple[str, int]:
    """Handle a run of characters that cannot be encoded."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    run = error.object[error.start : error.end]
    if run.strip("⁻⁰¹²³⁴⁵⁶⁷⁸⁹") == "":
        return "^" + run.translate(_SUPERSCRIPTS), error.end
    return "".join(_SPELT.get(character, "?") for character in run), error.end


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    complain(f"warning: {message}")
