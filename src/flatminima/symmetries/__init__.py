"""Symmetries of a network: maps of its parameters that leave its function unchanged.

They are found by tracing the network (`find_symmetries`), moved along (`random_equivalent`, `Symmetry.random`), checked
(`check_equivalent`) and divided out (`canonicalize`). A sharpness that changes under a move is a property of the
coordinates, not of the function.

Example:
    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> print(find_symmetries(net, torch.randn(8, 2)).describe())
    layer: rescaling of 1 hidden layers by positive numbers, what reads them divided by the same (dimension 1)
    node: rescaling of 4 hidden units by positive numbers, what reads them divided by the same (dimension 4)
    permutation: reordering of 4 hidden units in 1 sets (finite: about 10^1.4 orders)
"""

from flatminima.symmetries.canonical import CanonicalMove, canonical_move, canonicalize
from flatminima.symmetries.discovery import find_symmetries, model_at
from flatminima.symmetries.equivalence import check_equivalent, random_equivalent
from flatminima.symmetries.move import Composition, Move
from flatminima.symmetries.orbit import OrbitMinimum, minimize_over_rescalings
from flatminima.symmetries.permutation import Permutation, PermutationMove
from flatminima.symmetries.quotient import centre_classes, normalize_statistics
from flatminima.symmetries.rescaling import Rescaling, RescalingMove
from flatminima.symmetries.softmax_shift import ShiftMove, SoftmaxShift
from flatminima.symmetries.symmetry import KINDS, Symmetries, Symmetry

__all__ = [
    "KINDS",
    "CanonicalMove",
    "Composition",
    "Move",
    "OrbitMinimum",
    "Permutation",
    "PermutationMove",
    "Rescaling",
    "RescalingMove",
    "ShiftMove",
    "SoftmaxShift",
    "Symmetries",
    "Symmetry",
    "canonical_move",
    "canonicalize",
    "centre_classes",
    "check_equivalent",
    "find_symmetries",
    "minimize_over_rescalings",
    "model_at",
    "normalize_statistics",
    "random_equivalent",
]
