"""Of every test of the repository: how long an example takes says something about the machine, not about the code."""

from hypothesis import settings

settings.register_profile("turnwise", deadline=None)
settings.load_profile("turnwise")
