"""How the tests run: on one thread, and on the core that `--core` names.

    pytest                 the compiled core, as installed
    pytest --core torch    torch operations in its place
    pytest --core both     every test twice
    pytest --core tiny     the compiled core even on tiles of a few tokens, where torch would serve

A test marked `both_cores` runs on both, whatever the option.

One thread per process, since several run side by side, and spinning threads would slow them all;
the tests that are about threads set their own number.
"""

import gc

import pytest
import torch

from lmhead.sweep import kernels

torch.set_num_threads(1)

# Without such a device, `torch.manual_seed` notes for each kind where in the code it was called, to
# seed a device that is started later: three quarters of its time.
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():
        vars(device)["manual_seed_all"] = lambda _: None

CHOICES = ("native", "torch", "both", "tiny")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--core", choices=CHOICES, default="native", help="what serves the kernels")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "both_cores: run with and without the compiled core")
    gc.disable()  # while tests are imported and collected, which leaves little to free


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of garbage collections; trainers start many."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "core" in metafunc.fixturenames:
        return  # it is about the compiled core itself, see tests/native
    choice = metafunc.config.getoption("--core")
    if choice == "both" or metafunc.definition.get_closest_marker("both_cores"):
        metafunc.parametrize("served_by", ["native", "torch"], indirect=True)


@pytest.fixture(autouse=True)
def served_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which core this test runs on; processes that it starts follow."""
    choice: str = getattr(request, "param", request.config.getoption("--core"))
    if choice == "torch":
        monkeypatch.setattr(kernels, "core", None)
        monkeypatch.setenv("LMHEAD_NATIVE", "off")
    elif hasattr(request, "param") and kernels.core is None:
        pytest.skip("the compiled core is not installed; see `lmhead doctor`")
    elif choice == "tiny":
        monkeypatch.setattr(kernels, "MIN_ROWS", 1)
    return choice
