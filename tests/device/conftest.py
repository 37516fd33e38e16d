"""Where there is no accelerator, the tests of this folder run on the simulated one, and the run says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from device._support import IS_TWIN, KIND, _twin

collect_ignore_glob = [] if KIND else ["test_*.py"]


@pytest.fixture(autouse=True, params=["needed only", "others first"] if IS_TWIN else [KIND])
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    if not IS_TWIN:
        yield
        return
    with _twin.active(_twin.Twin(request.param)):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if IS_TWIN:
        terminalreporter.write_line("tests/device ran on a simulated accelerator, as torch finds none", yellow=True)
    elif KIND:
        terminalreporter.write_line(f"tests/device ran on {KIND!r}")
