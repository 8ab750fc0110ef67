"""A fingerprint of tensors, so that a repeated audit can be seen to be of the same network and data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["digest"]


def digest(tensors: Iterable[Tensor]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of the tensors' types, shapes and entries, in their order."""
    sha = hashlib.sha256()
    for tensor in tensors:
        entries = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        sha.update(f"{entries.dtype} {tuple(entries.shape)} ".encode())
        sha.update(entries.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()[:16]
