"""Find out how flat a minimum of a neural network is, and whether that number can be trusted.

Names are imported when they are first used, so that ``import flatminima`` is quick and loads no package for drawing or pages.

Example:
    >>> import torch, flatminima as fm
    >>> float(fm.trace(fm.as_operator(torch.diag(torch.tensor([1.0, 2.0, 3.0]))), num_products=4))
    6.0
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatminima import estimators, measures, operators, plots, problems, report, symmetries, trust
    from flatminima._errors import (
        CheckpointError,
        FlatminimaError,
        NonFiniteLoss,
        NotDeterministic,
        NotEquivalent,
        NotSupported,
    )
    from flatminima.estimators import (
        Eigenpairs,
        Estimate,
        block_traces,
        diagonal,
        eigenpairs,
        frobenius_norm,
        trace,
    )
    from flatminima.objective import Objective
    from flatminima.operators import GaussNewton, Hessian, as_operator
    from flatminima.symmetries import canonicalize, check_equivalent, find_symmetries, random_equivalent
    from flatminima.trust import Audit
    from flatminima.trust.audit import audit

    __version__: str

__all__ = [
    "Audit",
    "CheckpointError",
    "Eigenpairs",
    "Estimate",
    "FlatminimaError",
    "GaussNewton",
    "Hessian",
    "NonFiniteLoss",
    "NotDeterministic",
    "NotEquivalent",
    "NotSupported",
    "Objective",
    "__version__",
    "as_operator",
    "audit",
    "block_traces",
    "canonicalize",
    "check_equivalent",
    "diagonal",
    "eigenpairs",
    "estimators",
    "find_symmetries",
    "frobenius_norm",
    "measures",
    "operators",
    "plots",
    "problems",
    "random_equivalent",
    "report",
    "symmetries",
    "trace",
    "trust",
]

_PACKAGES = ("estimators", "measures", "operators", "plots", "problems", "report", "symmetries", "trust")

_HOMES = {
    "_errors": ("CheckpointError", "FlatminimaError", "NonFiniteLoss", "NotDeterministic", "NotEquivalent", "NotSupported"),
    "estimators": ("Eigenpairs", "Estimate", "block_traces", "diagonal", "eigenpairs", "frobenius_norm", "trace"),
    "objective": ("Objective",),
    "operators": ("GaussNewton", "Hessian", "as_operator"),
    "symmetries": ("canonicalize", "check_equivalent", "find_symmetries", "random_equivalent"),
    "trust": ("Audit",),
    "trust.audit": ("audit",),
}

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    elif name in _PACKAGES:
        value = importlib.import_module(f"{__name__}.{name}")
    elif name == "__version__":
        from importlib.metadata import version

        value = version(__name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
