"""Checkpoint: the state of a long estimate in a file, so that an interrupted one goes on where it was.

A file, once written, is whole (written beside and moved over), holds no code (safetensors: tensors and one JSON text), and
belongs to one run: the same arguments, and an operator that gives the same product. It holds the random generator's state too,
so that the answer is the same as without an interruption, bit for bit if the products are. (Those of a large model may go another
way through autograd in another process, and then differ by rounding.)
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import torch
from safetensors import SafetensorError
from torch import Tensor

from flatminima._errors import CheckpointError, first_line
from flatminima.objective.digest import combined, digest
from flatminima.operators.base import LinearOperator

__all__ = ["Checkpoint", "State"]

#: Seconds between two writes at least, and the largest share of the time that may go into writing.
SECONDS_BETWEEN_WRITES = 5.0
SHARE_OF_TIME = 0.05
_FORMAT = 1
_BUCKETS = 64
_START = "start"


@final
@dataclass(frozen=True)
class State:
    """What one stage of an estimate has come to.

    Attributes:
        tensors: By name; not changed in place once it is kept.
        numbers: Anything that JSON can hold, by name.
        rng: State of the random generator at that moment, bytes on the CPU.
    """

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Any]
    rng: Tensor


@final
class Checkpoint:
    """Keeps the state of one estimate in a file while it runs; with no file it does nothing.

    A context: an exception inside (``KeyboardInterrupt`` included) writes the newest state and goes on its way; the end without
    one removes the file, and so does an error before any state. An estimate has one stage or several, each by its name with a
    state of its own::

        with Checkpoint.open(resume, A, {"estimator": "trace", "rtol": rtol}, generator) as checkpoint:
            state = checkpoint.load("probes")  # None at first; sets the generator to where it was
            ...
            checkpoint.keep("probes", {"mean": mean}, {"count": count})  # after every step; written every few seconds
    """

    def __init__(self, path: Path | None, device: torch.device, generator: torch.Generator | None) -> None:
        self._path, self._device, self._generator = path, device, generator
        self._identity: dict[str, Any] = {}
        self._stages: dict[str, State] = {}
        self._next_write = 0.0

    @classmethod
    def none(cls) -> Checkpoint:
        """Return the checkpoint that keeps nothing."""
        return cls(None, torch.device("cpu"), None)

    @classmethod
    def open(
        cls,
        resume: str | os.PathLike[str] | None,
        A: LinearOperator,
        settings: Mapping[str, Any],
        generator: torch.Generator | None = None,
    ) -> Checkpoint:
        """Return the checkpoint of this run, with what an interrupted call left in the file.

        Where the file exists, the generator is set to the state in which that call found it, so that whatever precedes the
        first kept state can be repeated. Costs one product with A, and one write to see that the file can be written.

        Args:
            resume: The file, or None to keep nothing.
            A: The operator. Another one is recognised by its product with a fixed vector.
            settings: All that the result depends on, by name; JSON values.
            generator: Where the estimate draws from; None for torch's global one.

        Raises:
            TypeError: If ``resume`` is no path.
            ValueError: If the file is that of another run, or cannot be written. It is left as it is.
            CheckpointError: If the file is damaged.
        """
        if resume is None:
            return cls.none()
        if not isinstance(resume, str | os.PathLike):
            raise TypeError(f"`resume` must be a file's name or None. Got {type(resume).__name__}.")
        checkpoint = cls(Path(resume), A.device, generator)
        own: dict[str, Any] = dict(settings) | {"size": A.size, "dtype": str(A.dtype)}
        if generator is not None:
            own["seed"] = generator.initial_seed()
        own = json.loads(json.dumps(own))  # tuples become lists, as they will be when read
        checkpoint._identity = {"format": _FORMAT, "settings": own, "fingerprint": _fingerprint(A)}
        if Path(resume).exists():
            checkpoint._read(torch.finfo(A.dtype).eps)
            checkpoint.load(_START)
        else:
            checkpoint.keep(_START, {}, {})
        return checkpoint

    def load(self, stage: str) -> State | None:
        """Return the stage's newest state, on A's device, and set the generator to where it was; None if it has none."""
        state = self._stages.get(stage)
        if state is not None:
            if self._generator is not None:
                self._generator.set_state(state.rng)
            elif self._device.type == "cpu":
                torch.set_rng_state(state.rng)
            else:
                torch.get_device_module(self._device).set_rng_state(state.rng, self._device)
        return state

    def keep(self, stage: str, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Remember a stage's newest state, and write all stages if the last write is long enough ago.

        Args:
            stage: Name, without ``/``.
            tensors: Read when the file is written: new tensors each time, or views of rows that are not written again.
            numbers: JSON values.
        """
        if self._path is None:
            return
        self._stages[stage] = State(tensors, numbers, self._rng())
        if time.monotonic() >= self._next_write:
            self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if self._path is None:
            return
        got_nowhere = self._stages.keys() <= {_START} and isinstance(error, Exception)
        if error is None or got_nowhere:
            self._path.unlink(missing_ok=True)
            return
        try:
            self._write()
        except ValueError as failure:
            error.add_note(str(failure))

    def _rng(self) -> Tensor:
        if self._generator is not None:
            return self._generator.get_state()
        if self._device.type == "cpu":
            return torch.get_rng_state()
        rng: Tensor = torch.get_device_module(self._device).get_rng_state(self._device)
        return rng

    def _write(self) -> None:
        from safetensors.torch import save_file

        assert self._path is not None
        started = time.monotonic()
        tensors: dict[str, Tensor] = {}
        for stage, state in self._stages.items():
            parts = dict(state.tensors) | {"rng": state.rng}
            tensors |= {f"{stage}/{name}": part.detach().cpu().contiguous().clone() for name, part in parts.items()}
        numbers = {stage: dict(state.numbers) for stage, state in self._stages.items()}
        content = self._identity | {"stages": numbers}
        content["digest"] = _digest(tensors, content)
        beside = self._path.with_name(f"{self._path.name}.part")
        try:
            save_file(tensors, beside, metadata={"flatminima": json.dumps(content)})
            beside.replace(self._path)
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"`resume` must be a file that can be written. Got {str(self._path)!r}: {first_line(error)}. "
                "Give a file in a folder that exists and has room."
            ) from error
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
        now = time.monotonic()
        self._next_write = now + max(SECONDS_BETWEEN_WRITES, (now - started) / SHARE_OF_TIME)

    def _read(self, eps: float) -> None:
        """Take in the file's stages, if it is whole and of this run."""
        assert self._path is not None
        tensors, content = _contents(self._path)
        other = _difference(self._identity, content, eps)
        if other:
            raise ValueError(
                f"`resume` must be a new file or one that this run has left. Got {str(self._path)!r} of another run: {other}. "
                "Give another name, or remove the file."
            )
        for stage, numbers in content["stages"].items():
            own = {name.partition("/")[2]: part for name, part in tensors.items() if name.partition("/")[0] == stage}
            rng = own.pop("rng")
            # copies lie where an allocation begins, as they did before: where else, BLAS may sum in another order
            tensors_there = {name: part.to(self._device, copy=True) for name, part in own.items()}
            self._stages[stage] = State(tensors_there, numbers, rng)
        self._next_write = time.monotonic() + SECONDS_BETWEEN_WRITES


def _contents(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get("flatminima")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        content: dict[str, Any] = json.loads(text or "null")
        whole = content is not None and content.pop("digest") == _digest(tensors, content)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(_damaged(path, first_line(error))) from error
    if not whole:
        raise CheckpointError(_damaged(path, "its contents are not those that were written"))
    return tensors, content


def _damaged(path: Path, why: str) -> str:
    return f"{str(path)!r} is no state of an estimate, or is damaged: {why}. Give another name, or remove the file."


def _digest(tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> str:
    return combined([digest(tensors[name] for name in sorted(tensors)), json.dumps(content, sort_keys=True)])


def _fingerprint(A: LinearOperator) -> list[float]:
    """Return 64 signed sums of the entries of A v for a fixed v; the distance of two is about that of the products."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.empty(A.size, dtype=A.dtype).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
    product = signs.flip(0).double() * (A @ signs.to(A.device)).cpu().double()
    buckets = torch.arange(A.size) % _BUCKETS
    return torch.zeros(_BUCKETS, dtype=torch.float64).index_add(0, buckets, product).tolist()


def _difference(own: Mapping[str, Any], other: Mapping[str, Any], eps: float) -> str:
    """Return in words in what two runs differ, or nothing."""
    if other["format"] != own["format"]:
        return f"it was written in format {other['format']}, not {own['format']}"
    for name in own["settings"].keys() | other["settings"].keys():
        there, here = other["settings"].get(name), own["settings"].get(name)
        if there != here:
            return f"{name} is {there!r} there and {here!r} here"
    there, here = (torch.tensor(run["fingerprint"], dtype=torch.float64) for run in (other, own))
    if not (there - here).norm() <= eps**0.5 * torch.maximum(there.norm(), here.norm()):
        return "its operator gives another product (other parameters, data or loss)"
    return ""
