"""Symmetric matrices that are known by their products with vectors.

The Hessian and its relatives differ in what they keep of the loss: ``GaussNewton`` its curvature in the outputs, ``Fisher`` what
labels of the model's own would tell, ``EmpiricalFisher`` the gradients at the observed labels. All are operators, which add,
scale, shift and restrict without being formed.

Example:
    >>> import torch
    >>> A = as_operator(torch.diag(torch.tensor([1.0, 2.0])))
    >>> (2 * A).shift(0.5).to_dense().diag()
    tensor([2.5000, 4.5000])
"""

from flatminima.operators.base import LinearOperator
from flatminima.operators.class_split import ClassSplit, by_class, class_split
from flatminima.operators.dense import as_operator
from flatminima.operators.empirical_fisher import EmpiricalFisher
from flatminima.operators.fisher import Fisher
from flatminima.operators.gauss_newton import GaussNewton
from flatminima.operators.hessian import Hessian
from flatminima.operators.memory import MemoryForecast, predicted_memory
from flatminima.operators.self_check import verify
from flatminima.operators.verification import Check, Verification

__all__ = [
    "Check",
    "ClassSplit",
    "EmpiricalFisher",
    "Fisher",
    "GaussNewton",
    "Hessian",
    "LinearOperator",
    "MemoryForecast",
    "Verification",
    "as_operator",
    "by_class",
    "class_split",
    "predicted_memory",
    "verify",
]
