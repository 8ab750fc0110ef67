"""The loss of (model, loss function, data) as a function of one flat vector; everything else asks it for values."""

from flatminima.objective.digest import digest
from flatminima.objective.evaluators import Evaluation, Piece, gradients_of
from flatminima.objective.objective import Objective

__all__ = ["Evaluation", "Objective", "Piece", "digest", "gradients_of"]
