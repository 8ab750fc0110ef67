"""``flatminima measures``: every measure with its formula, source, invariances and cost."""

from __future__ import annotations

import argparse
import json
import sys

from flatminima import measures
from flatminima.cli.terminal import print_measures

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the command; see ``flatminima measures --help``."""
    declarations = [measures.get(name).declaration() for name in measures.available()]
    if arguments.json:
        sys.stdout.write(json.dumps(declarations, indent=1, ensure_ascii=False) + "\n")
    else:
        print_measures(declarations)
    return 0
