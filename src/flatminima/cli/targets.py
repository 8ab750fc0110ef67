"""From the word on the command line to an Objective."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flatminima import problems
from flatminima._errors import FlatminimaError
from flatminima._progress import Progress, no_progress
from flatminima._suggest import nearest
from flatminima.cli.checkpoints import load_into
from flatminima.objective import Objective

__all__ = ["TargetError", "prepare"]


class TargetError(FlatminimaError):
    """The target could not be turned into an objective."""


def prepare(
    target: str,
    *,
    data: str | None = None,
    checkpoint: str | None = None,
    num_examples: int | None = None,
    device: str | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Objective:
    """Return the objective that a target names.

    Args:
        target: Name of a built-in problem, or ``module:function``, which is imported and called.
        data: Path of the data, for a built-in problem that needs it.
        checkpoint: File with parameters for the objective's model.
        num_examples: Measure on so many of the first examples; None is all.
        device: Where to put the model; None leaves it.
        seed: Seed of a built-in problem's training; also given to torch's global generators before a function is called.
        progress: Told of the training.

    Raises:
        TargetError: If there is no such target, or the function raises or returns something else.
        CheckpointError: If the checkpoint cannot be read or does not fit.
        ValueError: If the data or the number of examples do not fit.
        NonFiniteLoss: If the checkpoint gives a loss that is not finite; the batch is named.
    """
    if checkpoint is not None and not (checkpoint and Path(checkpoint).is_file()):
        path = Path(checkpoint)
        wrong = "is a folder" if path.is_dir() else "is no regular file" if path.exists() else "does not exist"
        raise TargetError(f"--checkpoint: {checkpoint} {wrong}." if checkpoint else "--checkpoint must name a file. Got nothing.")
    place = _device(device)
    objective = _built_in(target, data, seed, progress) if ":" not in target else _of_user(target, data, seed)
    if checkpoint is not None:
        load_into(objective.model, checkpoint)
    if place is not None:
        objective.model.to(place)
    if checkpoint is not None or place is not None:
        objective = objective.with_model(objective.model)
        if not bool(torch.isfinite(objective.value())):
            objective.subset(objective.num_examples)  # looks at every batch again, and names the one
    return objective if num_examples is None else objective.subset(num_examples)


def _built_in(target: str, data: str | None, seed: int, progress: Progress) -> Objective:
    names = problems.names()
    if target not in names:
        hint = nearest(target, names)
        raise TargetError(f"There is no target {target!r}.{hint} Built in are {', '.join(names)}; your own is module:function.")
    if target == "mnist-cnn" and data is None:
        raise TargetError("mnist-cnn needs --data PATH: a file mnist.npz, or a folder with it or with the four idx files.")
    return problems.build(target, data=data, seed=seed, progress=progress).objective()


def _of_user(target: str, data: str | None, seed: int) -> Objective:
    if data is not None:
        raise TargetError(f"--data is for built-in targets. {target} reads its own data: leave it out.")
    module_name, _, path = target.partition(":")
    function = _find(_import(module_name), module_name, path)
    torch.manual_seed(seed)
    try:
        result = function()
    except (Exception, SystemExit) as error:
        raise TargetError(f"{target} raised {_described(error)}") from error
    if not isinstance(result, Objective):
        raise TargetError(f"{target} must return a flatminima.Objective. Got {type(result).__name__}.")
    return result


def _import(name: str) -> ModuleType:
    if name.endswith(".py") or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name):
        path = name.removesuffix(".py").strip("./\\").replace("/", ".").replace("\\", ".")
        hint = f" Write {path}:function." if path and path != name else ""
        raise TargetError(f"A target is module:function with the module's name as in an import. Got {name!r}.{hint}")
    here = os.getcwd()  # noqa: PTH109  (sys.path holds strings)
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and (name == error.name or name.startswith(error.name + ".")):
            hint = nearest(name, [path.stem for path in Path(here).glob("*.py")])
            raise TargetError(f"There is no module {error.name!r} here ({here}) nor among the installed ones.{hint}") from error
        raise TargetError(f"Importing {name} raised {_described(error)}") from error


def _find(module: ModuleType, module_name: str, path: str) -> Callable[[], Any]:
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            options = [name for name, value in vars(found).items() if callable(value) and not name.startswith("_")]
            raise TargetError(f"Module {module_name} has no function {path!r}.{nearest(part, options)}")
        found = getattr(found, part)
    if not callable(found):
        raise TargetError(f"{module_name}:{path} must be a function that returns an Objective. Got {type(found).__name__}.")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise TargetError(f"{module_name}:{path} must be callable without arguments ({error}). Give them defaults.") from error
    except ValueError:
        pass  # a builtin without a signature: the call itself will tell
    function: Callable[[], Any] = found
    return function


def _device(name: str | None) -> torch.device | None:
    if name is None:
        return None
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {name} is not there: {str(error).splitlines()[0].split('. ')[0][:200]}.") from error
    return device


def _described(error: BaseException) -> str:
    """Return the exception's type, its message, and the line of the user's code where it happened."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_ours(frame.filename)]
    users = [frame for frame in own if "site-packages" not in frame.filename and not frame.filename.startswith(_STANDARD)]
    where = (users or own or list(frames))[-1] if frames else None
    place = f" ({Path(where.filename).name}, line {where.lineno}, in {where.name})" if where else ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f" ({Path(error.filename).name}, line {error.lineno})"
        return f"{type(error).__name__}: {error.msg}{place}."
    message = str(error).strip().rstrip(".")
    return f"{type(error).__name__}{f': {message}' if message else ''}{place}."


_STANDARD = str(Path(os.__file__).parent)
_OURS = str(Path(__file__).parents[1])


def _is_ours(filename: str) -> bool:
    return filename.startswith((_OURS, "<frozen"))
