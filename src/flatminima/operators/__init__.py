"""Symmetric matrices that are known by their products with vectors."""

from flatminima.operators.base import LinearOperator, as_operator
from flatminima.operators.gauss_newton import GaussNewton
from flatminima.operators.hessian import Hessian

__all__ = ["GaussNewton", "Hessian", "LinearOperator", "as_operator"]
