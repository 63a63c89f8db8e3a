"""
The device of these tests, and the figures that they print.

A test that takes `target` runs on the device of TURNWISE_TEST_DEVICE, `cuda` by default, and is marked `gpu`. One that
is decorated with `small` also runs on a CPU in `make test`, so that the suite stays in order without a GPU.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import torch
from gpu_support import DEVICE, FIGURES, Target, describe


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test its devices."""
    if "target" in metafunc.fixturenames:
        targets = [pytest.param(Target(DEVICE), marks=pytest.mark.gpu, id=DEVICE)]
        if getattr(metafunc.function, "is_small", False):
            targets.append(pytest.param(Target("cpu", small=True), id="small"))
        metafunc.parametrize("target", targets)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the small variants in bfloat16 to `make test-slow`: a CPU takes seconds for them."""
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if params.get("target") == Target("cpu", small=True) and params.get("dtype") == "bfloat16":
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """End the session if the device is missing: a suite that skips everything would look like one that passed."""
    wanted = item.get_closest_marker("gpu") is not None and DEVICE.startswith("cuda")
    if wanted and Path(__file__).parent in item.path.parents and not torch.cuda.is_available():
        pytest.exit(f"torch finds no device {DEVICE}: set TURNWISE_TEST_DEVICE=cpu to run these tests on a CPU", 1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the machine and the figures; pytest itself lists each skipped test with its reason."""
    if FIGURES:
        terminalreporter.section(f"figures on {describe()}")
        for line in FIGURES:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a Qwen3 with random weights: 170 MB in float32, which a driver can see."""
    from gpu_support import save_qwen3

    return save_qwen3(tmp_path_factory.mktemp("model"), hidden_size=1024, num_layers=4)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a Qwen3 with two layers of width 32."""
    from gpu_support import save_qwen3

    return save_qwen3(tmp_path_factory.mktemp("tiny"), hidden_size=32, num_layers=2)
