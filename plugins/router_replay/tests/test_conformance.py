"""The column passes the conformance suite."""

from pathlib import Path

from turnwise import ModelSpec, NoConfig, Resources
from turnwise_router_replay import declare_routes
from turnwise_testing import ColumnSuite


class TestRoutedExperts(ColumnSuite):
    """The column follows its tokens."""

    entry_point = "router_replay"
    module = "turnwise_router_replay"
    registered = "routed_experts"


def test_the_shape_follows_the_model(model_dir):
    """Layers times experts of a token; a run without a mixture has the smallest column, which stays empty."""
    assert declare_routes(NoConfig(), Resources(model=ModelSpec(path=model_dir))).shape == (3, 2)
    for path in (None, Path("nowhere")):
        assert declare_routes(NoConfig(), Resources(model=ModelSpec(path=path))).shape == (1, 1)
