"""``flatminima audit``: prepare, audit, write, print."""

from __future__ import annotations

import argparse
import shlex
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from flatminima import measures, trust
from flatminima._errors import FlatminimaError
from flatminima.cli.entry import INTERRUPTED, complain
from flatminima.cli.interrupts import put_off
from flatminima.cli.targets import prepare
from flatminima.cli.terminal import print_audit, progress_bar
from flatminima.objective import Objective
from flatminima.operators import Hessian, predicted_memory
from flatminima.report import replacing
from flatminima.trust import Audit
from flatminima.trust.audit import check_scale

__all__ = ["run"]

_MUCH = 2**30


def run(arguments: argparse.Namespace) -> int:
    """Run the command; see ``flatminima audit --help``."""
    folder = _checked_folder(arguments.out)
    check_scale(arguments.scale)
    chosen = None if arguments.measures is None else [measures.get(name) for name in arguments.measures]
    threads = torch.get_num_threads()
    if ":" not in arguments.target:  # the built-in ones are small, and train alike whatever --threads says
        torch.set_num_threads(1)
    latest: list[Audit] = []
    try:
        with progress_bar(hidden=arguments.quiet) as progress:
            objective = prepare(
                arguments.target,
                data=arguments.data,
                checkpoint=arguments.checkpoint,
                num_examples=arguments.num_examples,
                device=arguments.device,
                seed=arguments.seed,
                progress=progress,
            )
            if arguments.threads is None:
                _use_the_faster_number_of_threads(objective, threads)
            else:
                torch.set_num_threads(arguments.threads)
            _tell_memory(objective, arguments)
            audit = trust.audit(
                objective,
                measures=chosen,
                num_moves=arguments.num_moves,
                scale=arguments.scale,
                generator=torch.Generator(objective.device).manual_seed(arguments.seed),
                dtype=None if arguments.dtype == "model" else getattr(torch, arguments.dtype),
                target=_target(arguments),
                command=_command(arguments),
                progress=progress,
                on_update=latest.append,
            )
    except KeyboardInterrupt:
        if not latest:
            raise
        files = _write(replace(latest[-1], complete=False), folder)
        complain(f"interrupted; what was measured by then is in {files[0]}.")
        return INTERRUPTED
    files = _write(audit, folder)
    if not arguments.quiet:
        print_audit(audit, files)
    return 0


def _target(arguments: argparse.Namespace) -> str:
    return f"{arguments.target} with {Path(arguments.checkpoint).name}" if arguments.checkpoint else str(arguments.target)


def _tell_memory(objective: Objective, arguments: argparse.Namespace) -> None:
    """Print what a product takes before the first one, where that is much; what does not fit is warned of in any case."""
    if not objective.has_model:
        return
    try:
        wide = objective if arguments.dtype == "model" else objective.to(getattr(torch, arguments.dtype))
        forecast = predicted_memory(Hessian(wide))
    except (RuntimeError, ValueError, FlatminimaError):  # no such product of this model: the audit tells why
        return
    if forecast.total > _MUCH and not arguments.quiet:
        complain(str(forecast))


def _use_the_faster_number_of_threads(objective: Objective, threads: int) -> None:
    """Use all threads where a gradient takes long enough to share and is clearly faster so; otherwise one.

    Operations of a millisecond are slower with several threads, and on a machine that does other work many times slower.
    """

    def seconds(number: int) -> float:
        torch.set_num_threads(number)
        objective.gradient()
        times = []
        for _ in range(3):
            start = time.perf_counter()
            objective.gradient()
            times.append(time.perf_counter() - start)
        return min(times)

    alone = seconds(1)
    if alone < 0.05 or seconds(threads) > 0.75 * alone:
        torch.set_num_threads(1)


def _command(arguments: argparse.Namespace) -> str:
    """Return the command line that repeats the run to the last digit: sums depend on the number of threads."""
    words = ["flatminima", *arguments.command_line]
    return shlex.join(words if arguments.threads else [*words, "--threads", str(torch.get_num_threads())])


def _checked_folder(name: str) -> Path:
    """Return the folder for the report, after seeing that it can be made and written to; nothing is made yet."""
    if not name:
        raise ValueError("--out must name a folder. Got nothing.")
    folder = Path(name)
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            raise ValueError(f"--out {folder}: {path} is a link to nothing. Name another folder.")
    for file in (folder / "report.json", folder / "report.html"):
        if file.is_dir():
            raise ValueError(f"--out {folder}: {file} is a folder, where a file is to be written. Name another folder.")
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"--out {folder}: {existing} is a file. Name a folder.")
    try:  # permissions do not tell everything
        tempfile.TemporaryDirectory(dir=existing, prefix=".flatminima-").cleanup()
    except OSError as error:
        raise ValueError(f"--out {folder}: {existing} cannot be written to ({error.strerror}). Name another folder.") from error
    return folder


def _write(audit: Audit, folder: Path) -> tuple[Path, Path]:
    """Write both files, uninterrupted, so that they belong together."""
    with put_off():
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "report.json") as temporary:
            audit.to_json(temporary)
        return audit.to_html(folder / "report.html"), folder / "report.json"
