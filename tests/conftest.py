"""Hypothesis draws the same examples in every run, so that a failure is the change's; `make test-all` draws new ones."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")
