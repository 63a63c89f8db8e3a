"""The conformance suites of the backends of workspaces."""

import pytest
from boxes import list_boxes, why_no_boxes
from images import ENGINE, IMAGE, RUN_OPTIONS, list_containers, why_no_containers

from turnwise_testing import WorkspaceSuite
from turnwise_testing.checks.workspace import WorkspaceExample, WorkspaceProbe
from turnwise_testing.probes.faulty_workspaces import Faults, FaultyBackend
from turnwise_workspaces import WorkspaceSpec
from turnwise_workspaces.bubblewrap import BubblewrapBackend
from turnwise_workspaces.config import ContainersConfig


@pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())
class TestBubblewrap(WorkspaceSuite):
    """Boxes of bubblewrap are isolated, bounded, and leave nothing."""

    entry_point = "workspaces"
    module = "turnwise_workspaces"
    registered = "bubblewrap"

    @pytest.fixture
    def examples(self):
        """Its processes can be counted."""
        return (WorkspaceExample(leftovers=list_boxes),)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())
class TestWithoutFaults(WorkspaceSuite):
    """The test kit's backend with faults changes nothing when it has none."""

    entry_point = "workspaces"
    module = "turnwise_workspaces"
    registered = "bubblewrap"

    @pytest.fixture
    def probe(self, config, resources):
        """Boxes behind it."""
        return WorkspaceProbe(
            make_backend=lambda: FaultyBackend(BubblewrapBackend(config, resources), Faults()),
            example=WorkspaceExample(leftovers=list_boxes),
        )


@pytest.mark.slow
class TestContainers(WorkspaceSuite):
    """Containers of podman are isolated, bounded, and leave nothing."""

    entry_point = "workspaces"
    module = "turnwise_workspaces"
    registered = "containers"

    @pytest.fixture(autouse=True)
    def engine(self):
        """Skip where no container runs."""
        if reason := why_no_containers():
            pytest.skip(reason)

    @pytest.fixture
    def config(self):
        """An engine that works as root of a virtual machine."""
        return ContainersConfig(command=ENGINE, run_options=RUN_OPTIONS)

    @pytest.fixture
    def examples(self):
        """An image without a registry; its containers can be counted."""
        return (WorkspaceExample(spec=WorkspaceSpec(image=IMAGE), leftovers=list_containers),)
