"""Numbers from products: what a symmetric operator is like, from its products with vectors alone.

Every random estimate has a standard error and stops on it; every eigenvalue has a residual. What has a closed form, or is cheaper
to compute exactly, is not sampled.

Example:
    >>> import torch
    >>> from flatminima.operators import as_operator
    >>> A = as_operator(torch.diag(torch.tensor([3.0, -5.0, 1.0])))
    >>> float(trace(A)), eigenpairs(A, k=1, which="LA").values.tolist()
    (-1.0, [3.0])
"""

from flatminima.estimators.bracket import EigenvalueBracket, eigenvalue_bracket
from flatminima.estimators.diagonal import diagonal
from flatminima.estimators.eigenpairs import Eigenpairs, eigenpairs
from flatminima.estimators.estimate import Estimate
from flatminima.estimators.frobenius import frobenius_norm
from flatminima.estimators.lanczos import lanczos
from flatminima.estimators.logdet import logdet
from flatminima.estimators.soft_rank import soft_rank
from flatminima.estimators.spectral_density import SpectralDensity, spectral_density
from flatminima.estimators.spectral_sum import spectral_sum
from flatminima.estimators.trace import block_traces, trace
from flatminima.estimators.volume_proxy import volume_proxy

__all__ = [
    "Eigenpairs",
    "EigenvalueBracket",
    "Estimate",
    "SpectralDensity",
    "block_traces",
    "diagonal",
    "eigenpairs",
    "eigenvalue_bracket",
    "frobenius_norm",
    "lanczos",
    "logdet",
    "soft_rank",
    "spectral_density",
    "spectral_sum",
    "trace",
    "volume_proxy",
]
