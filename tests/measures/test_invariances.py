"""Networks are moved along every symmetry they have, and each measure is held to what it declares: both ways."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from flatminima import measures as fm
from flatminima.objective import Objective
from flatminima.symmetries import KINDS, Symmetries, check_equivalent, find_symmetries

D64 = torch.float64
MEASURES: list[fm.Measure] = [
    *(fm.get(name) for name in fm.available()),
    fm.AdaptiveAverageSharpness(centre=False),
    fm.AdaptiveWorstSharpness(centre=False),
    fm.NormalizedSharpness(centre=False),
    fm.MinimumSharpness(biases=False),
]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.LeakyReLU(0.1), nn.Linear(7, 3))


def _cnn() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 2, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(5, 3),
    )  # fmt: skip
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0.0, 0.3)
            module.running_var.uniform_(0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0.0, 0.3)
    return model


NETWORKS = {"mlp": (_mlp, (6,)), "cnn with batch norm": (_cnn, (2, 4, 4))}


@functools.cache
def trained(name: str) -> tuple[Objective, Symmetries]:
    build, shape = NETWORKS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = build().double().eval()
        x, y = torch.randn(60, *shape, dtype=D64), torch.randint(0, 3, (60,))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(60):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    objective = Objective(model, F.cross_entropy, (x, y))
    return objective, find_symmetries(objective)


@functools.cache
def moved(name: str, kind: str) -> list[Objective]:
    objective, symmetries = trained(name)
    g = torch.Generator().manual_seed(7)
    result = []
    for _ in range(3):
        model = objective.model
        for symmetry in symmetries.of_kind(kind):
            model = symmetry.random(g, 1.0, state=dict(model.state_dict())).apply(model)
        args, _ = objective.example_inputs(60)
        assert check_equivalent(objective.model, model, args, shift_invariant=kind == "softmax shift") <= 1e-10
        result.append(objective.with_model(model))
    return result


@functools.cache
def base(name: str, measure: fm.Measure) -> tuple[float, float]:
    estimate = measure(trained(name)[0], generator=torch.Generator().manual_seed(1))
    return float(estimate), float(estimate.stderr)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("measure", MEASURES, ids=repr)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_measure_moves_exactly_where_it_says_so(name: str, measure: fm.Measure, kind: str) -> None:
    if kind not in trained(name)[1].kinds():
        assert (name, kind) == ("mlp", "norm-scale")
        pytest.skip("a network without normalisation has no such symmetry")
    value, stderr = base(name, measure)
    changes, noises = [], []
    for objective in moved(name, kind):
        estimate = measure(objective, generator=torch.Generator().manual_seed(1))
        changes.append(abs(float(estimate) - value) / abs(value))
        noises.append(4 * math.hypot(stderr, float(estimate.stderr)) / abs(value))
    if measure.invariances[kind]:
        assert all(change <= 1e-6 + noise for change, noise in zip(changes, noises, strict=True))
    else:  # the same probes at every point, so that a change is none of the noise's
        assert max(changes) > 1e-3
