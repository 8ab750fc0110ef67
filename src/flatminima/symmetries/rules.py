"""Which rule covers which operation."""

from __future__ import annotations

import torch

from flatminima.symmetries.rules_elementwise import ELEMENTWISE_RULES, pointwise
from flatminima.symmetries.rules_layers import LAYER_RULES
from flatminima.symmetries.rules_shape import SHAPE_RULES
from flatminima.symmetries.values import Value
from flatminima.symmetries.walk import Operation, Rule, Walk

__all__ = ["rule_for"]

_RULES: dict[str, Rule] = {**LAYER_RULES, **ELEMENTWISE_RULES, **SHAPE_RULES}
#: Rules whose result has the ids of what they write into, so that other names of that memory stay right.
_MAY_MUTATE = frozenset(ELEMENTWISE_RULES) | {"leaky_relu", "prelu"}


def rule_for(op: Operation) -> Rule:
    """Return the rule of an operation; one of no known name is covered if torch marks it as acting entry by entry."""
    if op.name.startswith("_assert"):
        return _no_result
    rule = _RULES.get(op.name)
    if rule is None and torch.Tag.pointwise in getattr(op.target, "tags", ()):
        rule = pointwise
    if rule is None or (op.mutates and op.name in _RULES and op.name not in _MAY_MUTATE):
        return _not_covered
    return rule


def _no_result(walk: Walk, op: Operation) -> Value:
    """A check of shapes or types: it reads no values."""
    return ()


def _not_covered(walk: Walk, op: Operation) -> Value:
    return None
