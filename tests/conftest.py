"""Options, directories and the worker processes that all tests share."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXPECTED_WARNINGS = (
    "torch.distributed is (disabled|unavailable)",
    "Detected an existing checkpoint",
    "Sparse C",
    "The PyTorch API of nested",
    "ComplexHalf",
    "torch.quantize_per_tensor",
    "TypedStorage",
    "`_get_pg_default_device`",
)


def file_system(path: Path) -> str:
    return subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True).stdout.strip()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that are left out because of their time too")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of what a script starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "DCPRING_SANITIZED" in os.environ:  # whose allocator may be locked in what is forked from a process with threads
        import _prepared  # noqa: F401  (says what that process loads)

        multiprocessing.set_start_method("forkserver")
        forkserver.ensure_running()  # before a test has anything open that is not its to keep
    config.addinivalue_line("markers", "slow(but=()): run with --slow only, but for the parameters with these ids")
    for message in EXPECTED_WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:{message}")
    if config.option.basetemp is None:
        config.option.basetemp = str(ROOT / "build" / f"pytest-{os.getpid()}")
        config.add_cleanup(lambda: shutil.rmtree(config.option.basetemp, ignore_errors=True))
    base = Path(config.option.basetemp).parent
    base.mkdir(parents=True, exist_ok=True)
    if file_system(base) in ("tmpfs", "ramfs"):
        raise pytest.UsageError(f"{base} is in memory, where O_DIRECT cannot be tested; choose another --basetemp")
    _require_test_hooks()


def _require_test_hooks() -> None:
    from dcpring import _C

    if not hasattr(_C, "arm_fault"):
        raise pytest.UsageError(
            f"{_C.__file__} is a wheel's: it lacks what tests call (arm_fault, start_recording, watch_gil). Run them "
            "with what `make setup` builds, or build it with DCPRING_TEST=1"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = {item for item in items if item.get_closest_marker("slow")}
    quick = {item for item in slow if _parameters(item) in _always(item)}
    if not any("::" in argument for argument in config.args):
        _check_names(slow, quick)
    if slow - quick and not config.getoption("--slow"):
        config.hook.pytest_deselected(items=list(slow - quick))
        items[:] = [item for item in items if item not in slow - quick]


def _parameters(item: pytest.Item) -> str:
    return item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""


def _always(item: pytest.Item) -> set[str]:
    """The parameters with which a slow test is run all the same."""
    marker = item.get_closest_marker("slow")
    return set(marker.kwargs.get("but", ())) if marker is not None else set()


def _check_names(slow: set[pytest.Item], quick: set[pytest.Item]) -> None:
    found = {(item.nodeid.partition("[")[0], _parameters(item)) for item in quick}
    for item in slow:
        test = item.nodeid.partition("[")[0]
        if missing := [name for name in _always(item) if (test, name) not in found]:
            raise pytest.UsageError(f"{test} has no parameters {missing}, which its mark 'slow' names")


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """As pytest's, on a disk, and emptied as soon as the test is over."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture(autouse=True)
def _others_go_on() -> Iterator[None]:
    """Whatever a test does, the core makes no system call with the GIL held."""
    import _gil

    with _gil.free_for_others():
        yield


@pytest.fixture(scope="session", autouse=True)
def _workers() -> Iterator[None]:
    yield
    import _distributed

    _distributed.close()


@pytest.fixture(scope="module")
def group_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
