"""A fingerprint of tensors: to see that a second pass, or a later run, is over the same data and network."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["combined", "digest"]

_DIGITS = 16


def digest(tensors: Iterable[Tensor]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of the tensors' types, shapes and entries, in their order."""
    sha = hashlib.sha256()
    for tensor in tensors:
        entries = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        sha.update(f"{entries.dtype} {tuple(entries.shape)} ".encode())
        sha.update(entries.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()[:_DIGITS]


def combined(digests: Iterable[str]) -> str:
    """Return the digest of several digests, in their order."""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:_DIGITS]
