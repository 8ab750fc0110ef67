"""The packages that flatminima is compared with, one file each: what each of them can do, by its own interface."""

from __future__ import annotations

import importlib
from importlib import metadata
from types import ModuleType

__all__ = ["PEERS", "load"]

#: Module in this folder, distribution, release.
PEERS = {
    "curvlinops": ("curvlinops-for-pytorch", "3.0.1"),
    "pyhessian": ("PyHessian", "0.1"),
    "hessian_eigenthings": ("hessian-eigenthings", "1.0.0a5"),
    "backpack": ("backpack-for-pytorch", "1.7.1"),
}


def load(key: str) -> ModuleType | str:
    """Return a peer's adapter, or the reason why it cannot run."""
    distribution, release = PEERS[key]
    try:
        found = metadata.version(distribution)
        if found != release:
            return f"{distribution} is {found}, not {release}; `make bench` installs what is compared"
        return importlib.import_module(f"benchmarks.peers.{key}")
    except metadata.PackageNotFoundError:
        return f"{distribution} {release} is not installed; `make bench` installs what is compared"
    except Exception as error:
        return f"{distribution} could not be imported: {type(error).__name__}: {error}"
