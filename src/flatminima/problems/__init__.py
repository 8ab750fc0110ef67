"""Data sets, reference networks and trained reference problems: what the audit can be tried on without a network of one's own.

Example:
    >>> build("digits-mlp").model.training
    False
"""

from flatminima.problems.builtin import Problem, build, describe, names
from flatminima.problems.dataset import Dataset
from flatminima.problems.digits import digits
from flatminima.problems.mnist import mnist
from flatminima.problems.networks import digits_cnn, mlp, mnist_cnn
from flatminima.problems.training import Training, TrainingResult, evaluate, train

__all__ = [
    "Dataset",
    "Problem",
    "Training",
    "TrainingResult",
    "build",
    "describe",
    "digits",
    "digits_cnn",
    "evaluate",
    "mlp",
    "mnist",
    "mnist_cnn",
    "names",
    "train",
]
