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
        SpectralDensity,
        block_traces,
        diagonal,
        eigenpairs,
        eigenvalue_bracket,
        frobenius_norm,
        logdet,
        soft_rank,
        spectral_density,
        spectral_sum,
        trace,
        volume_proxy,
    )
    from flatminima.objective import Objective
    from flatminima.operators import (
        EmpiricalFisher,
        Fisher,
        GaussNewton,
        Hessian,
        MemoryForecast,
        Verification,
        as_operator,
        by_class,
        class_split,
        predicted_memory,
        verify,
    )
    from flatminima.symmetries import canonicalize, check_equivalent, find_symmetries, random_equivalent
    from flatminima.trust import Audit
    from flatminima.trust.audit import audit

    __version__: str

__all__ = [
    "Audit",
    "CheckpointError",
    "Eigenpairs",
    "EmpiricalFisher",
    "Estimate",
    "Fisher",
    "FlatminimaError",
    "GaussNewton",
    "Hessian",
    "MemoryForecast",
    "NonFiniteLoss",
    "NotDeterministic",
    "NotEquivalent",
    "NotSupported",
    "Objective",
    "SpectralDensity",
    "Verification",
    "__version__",
    "as_operator",
    "audit",
    "block_traces",
    "by_class",
    "canonicalize",
    "check_equivalent",
    "class_split",
    "diagonal",
    "eigenpairs",
    "eigenvalue_bracket",
    "estimators",
    "find_symmetries",
    "frobenius_norm",
    "logdet",
    "measures",
    "operators",
    "plots",
    "predicted_memory",
    "problems",
    "random_equivalent",
    "report",
    "soft_rank",
    "spectral_density",
    "spectral_sum",
    "symmetries",
    "trace",
    "trust",
    "verify",
    "volume_proxy",
]

_PACKAGES = ("estimators", "measures", "operators", "plots", "problems", "report", "symmetries", "trust")

_HOMES = {
    "_errors": ("CheckpointError", "FlatminimaError", "NonFiniteLoss", "NotDeterministic", "NotEquivalent", "NotSupported"),
    "estimators": (
        "Eigenpairs",
        "Estimate",
        "SpectralDensity",
        "block_traces",
        "diagonal",
        "eigenpairs",
        "eigenvalue_bracket",
        "frobenius_norm",
        "logdet",
        "soft_rank",
        "spectral_density",
        "spectral_sum",
        "trace",
        "volume_proxy",
    ),
    "objective": ("Objective",),
    "operators": (
        "EmpiricalFisher",
        "Fisher",
        "GaussNewton",
        "Hessian",
        "MemoryForecast",
        "Verification",
        "as_operator",
        "by_class",
        "class_split",
        "predicted_memory",
        "verify",
    ),
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
