"""Leaves the tests of this folder out where there is no accelerator, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from device._support import KIND

HERE = Path(__file__).parent

_left_out: list[pytest.Item] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if KIND:
        return
    _left_out[:] = [item for item in items if item.path.is_relative_to(HERE)]
    config.hook.pytest_deselected(items=_left_out)
    items[:] = [item for item in items if not item.path.is_relative_to(HERE)]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Nothing to run is no failure where all that was asked for needs an accelerator."""
    if _left_out and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_out:
        terminalreporter.write_line(
            f"NOT RUN: {len(_left_out)} tests in tests/device, as torch finds no accelerator on this machine",
            yellow=True,
        )
    elif KIND:
        terminalreporter.write_line(f"tests/device ran on {KIND!r}")
