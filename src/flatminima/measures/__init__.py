"""Sharpness measures: one paper a file, each a frozen configuration that one calls on an objective.

Every measure says what leaves it unchanged (`Measure.invariances`), and the tests hold it to that in both directions.

Example:
    >>> get("hessian-trace")
    HessianTrace(rtol=0.02)
"""

from flatminima._suggest import nearest
from flatminima.measures.adaptive_sharpness import AdaptiveAverageSharpness, AdaptiveWorstSharpness
from flatminima.measures.base import Measure
from flatminima.measures.epsilon_sharpness import EpsilonSharpness
from flatminima.measures.fisher_rao import FisherRao
from flatminima.measures.frobenius_norm import FrobeniusNorm
from flatminima.measures.hessian_trace import HessianTrace
from flatminima.measures.largest_eigenvalue import LargestEigenvalue
from flatminima.measures.minimum_sharpness import MinimumSharpness
from flatminima.measures.nodewise_minimum_sharpness import NodewiseMinimumSharpness
from flatminima.measures.normalized_sharpness import NormalizedSharpness
from flatminima.measures.radial_curvature import RadialCurvature
from flatminima.measures.squared_norm import SquaredNorm

__all__ = [
    "AdaptiveAverageSharpness",
    "AdaptiveWorstSharpness",
    "EpsilonSharpness",
    "FisherRao",
    "FrobeniusNorm",
    "HessianTrace",
    "LargestEigenvalue",
    "Measure",
    "MinimumSharpness",
    "NodewiseMinimumSharpness",
    "NormalizedSharpness",
    "RadialCurvature",
    "SquaredNorm",
    "available",
    "get",
]

_ALL: tuple[type[Measure], ...] = (
    LargestEigenvalue,
    HessianTrace,
    FrobeniusNorm,
    EpsilonSharpness,
    AdaptiveAverageSharpness,
    AdaptiveWorstSharpness,
    MinimumSharpness,
    NodewiseMinimumSharpness,
    NormalizedSharpness,
    FisherRao,
    RadialCurvature,
    SquaredNorm,
)


def available() -> tuple[str, ...]:
    """Return the names of all measures, in the order of the trust table."""
    return tuple(measure.key for measure in _ALL)


def get(name: str) -> Measure:
    """Return the measure of this name with its default settings.

    Raises:
        ValueError: If there is none; the nearest name is given.
    """
    for measure in _ALL:
        if measure.key == name:
            return measure()
    raise ValueError(f"There is no measure {name!r}.{nearest(name, available())} See `flatminima measures`.")
