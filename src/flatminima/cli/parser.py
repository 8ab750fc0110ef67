"""What the command line looks like."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

from flatminima._suggest import nearest

__all__ = ["DTYPES", "Command", "build_parser"]

_Number = TypeVar("_Number", int, float)

Command = Callable[[argparse.Namespace], int]

_MOST_THREADS = 1024
DTYPES = ("float64", "float32", "model")

_AUDIT = """\
Measure how sharp a trained network's minimum is, move the network along its own symmetries (its outputs stay the same),
measure again, and say which numbers survived. Prints the trust table; writes report.html and report.json.
"""

_TARGET = """\
TARGET is digits-mlp, digits-cnn or mnist-cnn (with --data), which are trained here in seconds,
or module:function for a network of your own. The function is called without arguments and
returns a flatminima.Objective. Naming it imports and RUNS THAT CODE, so name only code that
you trust; the current folder is searched first.

examples:
  flatminima audit digits-mlp
  flatminima audit mysetup:objective --checkpoint model.safetensors --out report

exit status: 0, or 2 for bad usage or input, 130 when interrupted (what was measured by then is
written), 1 for an error that was not foreseen.
"""


_VERIFY = """\
Compare the gradient, and the products with the Hessian and the Gauss-Newton matrix, with a second way to each: differences of
the loss, of the gradient and of the outputs, and a plain backward pass. Prints what was compared, and the memory a product takes.
"""

_VERIFY_TARGET = """\
TARGET is as for `flatminima audit`: digits-mlp, digits-cnn or mnist-cnn (with --data), or module:function,
which imports and RUNS THAT CODE.

examples:
  flatminima verify digits-mlp --num-examples 64
  flatminima verify mysetup:objective --checkpoint model.safetensors

exit status: 0 if all checks agree, 1 if one does not (or for an error that was not foreseen), 2 for bad usage or
input, 130 when interrupted.
"""


class _Parser(argparse.ArgumentParser):
    """An argument parser that complains in one line, with the nearest option."""

    def error(self, message: str) -> NoReturn:
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            message += "." + nearest(message.removeprefix(prefix).split()[0].partition("=")[0], self._long_options())
        elif "invalid choice: " in message and "(choose from " in message:
            given, _, choices = message.partition("invalid choice: ")[2].partition(" (choose from ")
            message += "." + nearest(given.strip("'"), [choice.strip("' ") for choice in choices.rstrip(")").split(",")])
        self.exit(2, f"flatminima: {message.rstrip('.')}{'' if message.endswith('?') else '.'} See `{self.prog} --help`.\n")

    def _long_options(self) -> list[str]:
        """Return the options of this parser and of its commands."""
        found: list[str] = []
        for action in self._actions:
            found += [option for option in action.option_strings if option.startswith("--")]
            if isinstance(action, argparse._SubParsersAction):
                found += [option for parser in action.choices.values() for option in parser._long_options()]
        return list(dict.fromkeys(found))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; ``arguments.load`` imports a command and returns it."""
    common = _Parser(add_help=False)
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")
    parser = _Parser(
        prog="flatminima",
        description="Find out how flat a minimum of a neural network is, and whether that number can be trusted.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    _add_audit(commands, common)
    _add_verify(commands, common)
    _add_measures(commands, common)
    return parser


def _add_audit(commands: argparse._SubParsersAction[_Parser], common: _Parser) -> None:
    audit = commands.add_parser(
        "audit",
        parents=[common],
        help="measure a network's sharpness, and which of the numbers can be trusted",
        description=_AUDIT,
        epilog=_TARGET,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = audit.add_argument
    add("target", metavar="TARGET", help="a built-in network, or module:function (runs that code)")
    add("--out", metavar="DIR", default="flatminima-report", help="folder for report.html and report.json (default %(default)s)")
    add("--data", metavar="PATH", help="file or folder of MNIST, for mnist-cnn")
    add("--checkpoint", metavar="FILE", help="trained parameters: .safetensors, or torch.save of a state dict (weights only)")
    add("--measures", metavar="A,B,…", type=_names, help="which measures (default all; see `flatminima measures`)")
    add("--num-moves", metavar="N", type=_positive(int), default=3, help="random moves along each symmetry (default %(default)s)")
    add("--scale", metavar="S", type=_positive(float), default=1.0,
        help="size of the moves: sd of the log of each factor (default %(default)s)")  # fmt: skip
    add("--num-examples", metavar="N", type=_positive(int), help="measure on the first N examples (default all)")
    add("--seed", metavar="N", type=_seed, default=0, help="seed of training, moves and probes (default %(default)s)")
    add("--dtype", choices=DTYPES, default="float64", help="precision to compute in (default %(default)s)")
    add("--device", metavar="DEVICE", help="where to compute: cpu, cuda, … (default: where the target's model is)")
    add(
        "--threads",
        metavar="N",
        type=_threads,
        help="threads for the audit on the CPU (default: all where that makes gradients clearly faster, otherwise one)",
    )
    add("--quiet", action="store_true", help="print nothing but errors")
    audit.set_defaults(load=_load_audit)


def _add_verify(commands: argparse._SubParsersAction[_Parser], common: _Parser) -> None:
    verify = commands.add_parser(
        "verify",
        parents=[common],
        help="check the derivatives and curvature products of a network by a second way to each",
        description=_VERIFY,
        epilog=_VERIFY_TARGET,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = verify.add_argument
    add("target", metavar="TARGET", help="a built-in network, or module:function (runs that code)")
    add("--data", metavar="PATH", help="file or folder of MNIST, for mnist-cnn")
    add("--checkpoint", metavar="FILE", help="trained parameters: .safetensors, or torch.save of a state dict (weights only)")
    add("--num-examples", metavar="N", type=_positive(int), help="use the first N examples (default all)")
    add("--seed", metavar="N", type=_seed, default=0, help="seed of training and of the directions (default %(default)s)")
    add("--device", metavar="DEVICE", help="where to compute: cpu, cuda, … (default: where the target's model is)")
    add("--threads", metavar="N", type=_threads, default=1, help="threads on the CPU (default %(default)s)")
    add("--json", action="store_true", help="print JSON instead of a table")
    verify.set_defaults(load=_load_verify)


def _add_measures(commands: argparse._SubParsersAction[_Parser], common: _Parser) -> None:
    measures = commands.add_parser(
        "measures",
        parents=[common],
        help="list every measure: formula, source, what leaves it unchanged, cost",
        description="List every measure with its formula, its source, the symmetries that leave it unchanged, and its cost.",
        allow_abbrev=False,
    )
    measures.add_argument("--json", action="store_true", help="print JSON instead of a table")
    measures.set_defaults(load=_load_measures)


def _load_audit() -> Command:
    from flatminima.cli.audit import run

    return run


def _load_verify() -> Command:
    from flatminima.cli.verify import run

    return run


def _load_measures() -> Command:
    from flatminima.cli.measures import run

    return run


class _Version(argparse.Action):
    """Print the version; it is looked up only then."""

    def __call__(self, *_arguments: object, **_options: object) -> NoReturn:
        from flatminima import __version__

        sys.stdout.write(f"flatminima {__version__}\n")
        raise SystemExit(0)


def _positive(kind: type[_Number]) -> Callable[[str], _Number]:
    def parse(text: str) -> _Number:
        try:
            value = kind(text)
        except ValueError:
            value = kind(0)
        if not 0 < value < float("inf"):
            noun = "a whole number of at least 1" if kind is int else "a finite number above 0"
            raise argparse.ArgumentTypeError(f"must be {noun}. Got {text!r}")
        return value

    return parse


def _threads(text: str) -> int:
    value = _positive(int)(text)
    if value > _MOST_THREADS:
        raise argparse.ArgumentTypeError(f"must be at most {_MOST_THREADS:,} (more crash PyTorch). Got {text!r}")
    return value


def _seed(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2^63 − 1. Got {text!r}")
    return value


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("must name at least one measure")
    return list(dict.fromkeys(names))
