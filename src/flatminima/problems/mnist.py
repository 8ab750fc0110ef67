"""MNIST, read from a place that the user names; nothing is downloaded."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatminima._checks import check_at_least
from flatminima.problems.dataset import Dataset
from flatminima.problems.idx import read_idx

__all__ = ["mnist"]

_SIDE = 28
_NUM_CLASSES = 10
#: The part's name here, in the idx files, and in Keras's archive.
_PARTS = {
    "train_images": ("train-images", "x_train"),
    "train_labels": ("train-labels", "y_train"),
    "test_images": ("t10k-images", "x_test"),
    "test_labels": ("t10k-labels", "y_test"),
}


def mnist(path: str | PathLike[str], *, num_train: int | None = None, num_test: int | None = None) -> Dataset:
    """Read MNIST, with pixels scaled from 0…255 to 0…1, in the order of the files.

    Args:
        path: An ``.npz`` archive with ``train_images``, ``train_labels``, ``test_images`` and ``test_labels`` (or Keras's
            ``x_train``, ``y_train``, ``x_test``, ``y_test``), or a folder that holds ``mnist.npz`` or the four idx files,
            with or without ``.gz``.
        num_train: Keep only the first so many training images; None keeps all.
        num_test: Keep only the first so many test images; None keeps all.

    Returns:
        Dataset with inputs of shape ``(num, 1, 28, 28)``.

    Raises:
        FileNotFoundError: If nothing is there, or the folder holds no MNIST.
        ValueError: If a file is damaged or holds something else than MNIST.

    References:
        LeCun, Cortes & Burges, "The MNIST database of handwritten digits".
    """
    place = Path(path).expanduser()
    read, source = _find(place)
    parts = {
        "train": _labelled(read, "train", num_train, source),
        "test": _labelled(read, "test", num_test, source),
    }
    return Dataset(*parts["train"], *parts["test"], "mnist", str(source))


#: Gives one of the four parts by its name.
_Reader = Callable[[str], NDArray[np.generic]]


def _find(place: Path) -> tuple[_Reader, Path]:
    looked_for = "mnist.npz or train-images-idx3-ubyte[.gz] and its three companions"
    if not place.exists():
        raise FileNotFoundError(f"MNIST must be at {place}, but there is no such file or folder. Looked for {looked_for}.")
    archive = place / "mnist.npz" if place.is_dir() else place
    if archive.is_file():
        return _read_archive(archive), archive
    files = {part: _idx_file(place, part) for part in _PARTS}
    missing = [f"{_PARTS[part][0]}-idx{_dimensions(part)}-ubyte[.gz]" for part, file in files.items() if file is None]
    if len(missing) == len(files):
        raise FileNotFoundError(f"The folder {place} must hold MNIST. Looked for {looked_for}.")
    if missing:
        raise FileNotFoundError(f"The folder {place} must hold all four files of MNIST. Missing: {', '.join(missing)}.")
    found = {part: file for part, file in files.items() if file is not None}
    return (lambda part: read_idx(found[part], _dimensions(part))), place


def _idx_file(folder: Path, part: str) -> Path | None:
    stem, dimensions = _PARTS[part][0], _dimensions(part)
    names = [f"{stem}{dot}idx{dimensions}-ubyte{packed}" for dot in "-." for packed in ("", ".gz")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _dimensions(part: str) -> int:
    return 3 if part.endswith("images") else 1


def _read_archive(path: Path) -> _Reader:
    try:
        archive = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} must be an .npz archive of plain arrays. Got something else or a damaged one.") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise ValueError(f"{path} must be an .npz archive of plain arrays. Got a single array.")
    with archive:
        names = {part: next((n for n in (part, keras) if n in archive.files), None) for part, (_, keras) in _PARTS.items()}
        missing = [part for part, name in names.items() if name is None]
        if missing:
            raise ValueError(
                f"{path} must hold {', '.join(_PARTS)}. Missing: {', '.join(missing)}. Got: {', '.join(archive.files)}."
            )
        try:
            arrays = {part: archive[name] for part, name in names.items() if name is not None}
        except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path} must hold plain arrays. Got a damaged archive or one of Python objects.") from error
    return arrays.__getitem__


def _labelled(read: _Reader, split: str, limit: int | None, source: Path) -> tuple[Tensor, Tensor]:
    """Return checked images ``(num, 1, 28, 28)`` in 0…1 and labels ``(num,)``."""
    if limit is not None:
        check_at_least(f"num_{split}", limit, 1)
    images, labels = read(f"{split}_images"), read(f"{split}_labels")
    pixels = _checked(images, limit, (_SIDE, _SIDE), 256, f"{split} images", source)
    classes = _checked(labels, limit, (), _NUM_CLASSES, f"{split} labels", source)
    if len(images) != len(labels):
        raise ValueError(f"{source} must hold as many {split} labels as images. Got {len(labels)} and {len(images)}.")
    return pixels.to(torch.float32).unsqueeze(1) / 255, classes.to(torch.int64)


def _checked(array: NDArray[np.generic], limit: int | None, shape: tuple[int, ...], end: int, what: str, source: Path) -> Tensor:
    """Return the first ``limit`` entries as bytes, each of this shape and between 0 and ``end - 1``."""
    if array.ndim == 0 or array.shape[1:] != shape or not len(array):
        raise ValueError(f"The {what} of {source} must have shape {('num', *shape)}, num at least 1. Got {array.shape}.")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"The {what} of {source} must be integers from 0 to {end - 1}. Got {array.dtype}.")
    kept = array[:limit]
    low, high = int(kept.min()), int(kept.max())
    if low < 0 or high >= end:
        raise ValueError(f"The {what} of {source} must be integers from 0 to {end - 1}. Got {low} to {high}.")
    return torch.from_numpy(kept.astype(np.uint8))
