"""``flatminima verify``: prepare, forecast the memory, check, print."""

from __future__ import annotations

import argparse
import json
import sys

import torch

from flatminima._errors import FlatminimaError
from flatminima.cli.targets import prepare
from flatminima.cli.terminal import progress_bar
from flatminima.objective import Objective
from flatminima.operators import GaussNewton, Hessian, LinearOperator, predicted_memory, verify

__all__ = ["DIFFERS", "run"]

DIFFERS = 1


def run(arguments: argparse.Namespace) -> int:
    """Run the command; see ``flatminima verify --help``."""
    torch.set_num_threads(arguments.threads)
    with progress_bar(hidden=arguments.json) as progress:
        objective = prepare(
            arguments.target,
            data=arguments.data,
            checkpoint=arguments.checkpoint,
            num_examples=arguments.num_examples,
            device=arguments.device,
            seed=arguments.seed,
            progress=progress,
        )
    if objective.has_model and not arguments.json:
        _print_memory(objective)
    found = verify(objective, generator=torch.Generator(objective.device).manual_seed(arguments.seed))
    sys.stdout.write(json.dumps(found.to_dict(), indent=1, ensure_ascii=False) + "\n" if arguments.json else f"{found}\n")
    return 0 if found.ok else DIFFERS


def _print_memory(objective: Objective) -> None:
    """Print what a product takes before the first one is made."""
    matrix: type[LinearOperator]
    for matrix in (Hessian, GaussNewton):
        try:
            forecast = predicted_memory(matrix(objective))
        except (RuntimeError, FlatminimaError):  # a model without this product: the checks tell why
            continue
        sys.stdout.write(f"{matrix.__name__}: {forecast}\n")
    sys.stdout.write("\n")
    sys.stdout.flush()
