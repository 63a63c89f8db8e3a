"""Fixtures of tiny mixtures of experts."""

import sys
from pathlib import Path

import pytest

from turnwise_moe_routes.shapes import find_shape

sys.path.insert(0, str(Path(__file__).parent))  # for the module beside this file

from tiny_mixtures import KINDS, make_model


@pytest.fixture(params=KINDS)
def kind(request):
    """The architecture."""
    return request.param


@pytest.fixture
def model(kind):
    """A model of the architecture."""
    return make_model(kind)


@pytest.fixture
def shape(model):
    """The sizes of its routes."""
    return find_shape(model.config.to_dict())
