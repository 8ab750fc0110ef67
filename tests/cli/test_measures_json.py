from __future__ import annotations

import json
from collections.abc import Callable

from flatminima import measures
from tests.cli.conftest import Result


def test_measures_as_json_are_their_declarations(run: Callable[..., Result]) -> None:
    result = run("measures", "--json")
    assert json.loads(result.out) == [measures.get(name).declaration() for name in measures.available()]
