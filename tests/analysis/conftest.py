"""Hypothesis on a machine that others use as well: how long an example takes says nothing."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
