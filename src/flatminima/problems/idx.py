"""The idx format, in which MNIST was first published: a strict reader.

Two zero bytes, one byte for the type, one for the number d of dimensions, d sizes as big-endian 32-bit integers, then the
entries in row-major order. Only unsigned bytes (type 8) occur in MNIST, and only they are read.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["read_idx"]

_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, num_dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes; one whose name ends in ``.gz`` is unpacked on the way.

    Args:
        path: The file.
        num_dimensions: Number of dimensions that the array must have.

    Returns:
        Array of ``num_dimensions`` dimensions.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged, cut short, too long, or holds another type or number of dimensions.

    References:
        LeCun, Cortes & Burges, "The MNIST database of handwritten digits", section "File formats".
    """
    content = _read_bytes(path)
    magic = bytes([0, 0, _UNSIGNED_BYTE, num_dimensions])
    if content[:4] != magic:
        raise ValueError(
            f"{path} must begin with the bytes {magic.hex()} (idx, unsigned bytes). Got {content[:4].hex() or 'nothing'}."
        )
    start = 4 + 4 * num_dimensions
    if len(content) < start:
        raise ValueError(f"{path} must hold {num_dimensions} sizes after its first 4 bytes. Got {len(content)} bytes in all.")
    shape = struct.unpack(f">{num_dimensions}I", content[4:start])
    expected = start + math.prod(shape)
    if len(content) != expected:
        raise ValueError(f"{path} must be {expected} bytes long (its header says {shape}). Got {len(content)}. Fetch it again.")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def _read_bytes(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} must be a whole gzip file. Got a damaged one ({error}). Fetch it again.") from error
