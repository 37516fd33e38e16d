"""Fails where io_uring should work and does not, so that tests of it cannot pass by running something else."""

from __future__ import annotations

import ctypes
import errno
import itertools
from pathlib import Path

import pytest
from fault._support import equal, failure, fault, load, needed_files, run_python, save, small_state, tensor_state
from torch.distributed.checkpoint.api import CheckpointException

from dcpring import CheckpointError, verify

STATE = small_state(1)
_IO_URING_SETUP = 425


def kernel_says_no() -> str:
    """Why the kernel is told to refuse io_uring to this process; "" where it is not."""
    switch = Path("/proc/sys/kernel/io_uring_disabled")
    if switch.exists() and switch.read_text().strip() != "0":
        return f"{switch} is {switch.read_text().strip()}"
    status = Path("/proc/self/status").read_text()
    seccomp = next((line.split()[1] for line in status.splitlines() if line.startswith("Seccomp:")), "0")
    libc = ctypes.CDLL(None, use_errno=True)
    # Bad arguments: a kernel that has the call, and is allowed to run it, answers EFAULT or EINVAL.
    libc.syscall(_IO_URING_SETUP, 1, None)
    if seccomp != "0" and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS):
        return f"a seccomp filter answers io_uring_setup with {errno.errorcode[ctypes.get_errno()]}"
    return ""


@pytest.mark.skipif(bool(kernel_says_no()), reason=f"io_uring is switched off here: {kernel_says_no()}")
def test_auto_is_uring(tmp_path: Path) -> None:
    writer = save(STATE, tmp_path)
    assert writer.stats is not None
    assert writer.stats.engine == "uring"
    assert equal(load(STATE, tmp_path, engine="uring"), STATE)


def test_this_machine_lets_the_suite_use_uring() -> None:
    """The suite's own condition: a machine that switches io_uring off does not test dcpring."""
    assert kernel_says_no() == ""


@pytest.mark.parametrize("call", ("uring_init", "uring_try"))
@pytest.mark.parametrize("err", (errno.EPERM, errno.ENOSYS, errno.ENOMEM, errno.EMFILE))
def test_refused_at_setup(tmp_path: Path, call: str, err: int) -> None:
    with fault(call, 1, err, True):
        writer = save(STATE, tmp_path)
        assert writer.stats is not None
        assert writer.stats.engine == "threads"
        assert equal(load(STATE, tmp_path), STATE)
    assert equal(load(STATE, tmp_path), STATE)


FORBIDDEN = """
import ctypes, struct, sys
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from dcpring import RingReader, RingWriter

def forbid(call: int, err: int) -> None:
    # Load the call's number; if it is this one, give err; else allow.
    program = [(0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, 0x00050000 | err), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, filter, 0, 0) == 0  # seccomp, by a filter

forbid(426, int(sys.argv[2]))  # io_uring_enter
state = {"large": torch.arange(3_000_000.0), "small": torch.ones(3)}
writer = RingWriter(Path(sys.argv[1]))
dcp.save(state, storage_writer=writer, no_dist=True)
loaded = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
reader = RingReader(Path(sys.argv[1]))
dcp.load(loaded, storage_reader=reader, no_dist=True)
assert all(torch.equal(loaded[key], state[key]) for key in state)
print(writer.stats.engine)
"""


@pytest.mark.parametrize("err", (errno.EPERM, errno.ENOSYS))
def test_a_sandbox_that_refuses_io_uring_enter_alone(tmp_path: Path, err: int) -> None:
    assert run_python(FORBIDDEN, str(tmp_path / "checkpoint"), str(err)) == "threads\n"


@pytest.mark.parametrize("engine", ("auto", "uring", "threads"))
@pytest.mark.parametrize("nth", (1, 2))
def test_no_thread_can_be_started(tmp_path: Path, engine: str, nth: int) -> None:
    state = tensor_state(1, mib=6)
    with fault("thread", nth, errno.EAGAIN, True):
        writer = save(state, tmp_path, engine=engine, thread_count=3)
        assert writer.stats is not None
        assert engine in ("auto", writer.stats.engine)
        assert equal(load(state, tmp_path, engine=engine, workers=3), state)
        assert verify(tmp_path).ok


def test_refused_and_insisted_on(tmp_path: Path) -> None:
    save(STATE, tmp_path)
    before = needed_files(tmp_path)
    for attempt, call in itertools.product((save, load), ("uring_init", "uring_try")):
        with pytest.raises(CheckpointException) as caught, fault(call, 1, errno.EPERM, True):
            attempt(STATE, tmp_path, engine="uring")
        error = failure(caught.value)
        assert isinstance(error, (OSError, CheckpointError))
        for part in ("io_uring", "kernel.io_uring_disabled", 'engine="threads"', str(tmp_path)):
            assert part in str(error)
    assert needed_files(tmp_path) == before == {entry.name for entry in tmp_path.iterdir()}


@pytest.mark.parametrize("err", (errno.ENOMEM, errno.EPERM, errno.EOPNOTSUPP))
@pytest.mark.parametrize("sticky", (True, False))
def test_buffers_cannot_be_registered(tmp_path: Path, err: int, sticky: bool) -> None:
    with fault("uring_register", 1, err, sticky):
        writer = save(STATE, tmp_path, engine="uring")
        assert equal(load(STATE, tmp_path, engine="uring"), STATE)
    assert writer.stats is not None
    assert writer.stats.engine == "uring"


UNDER_A_SMALL_LIMIT = """
import resource, sys
from fault._support import Path, equal, load, save, small_state

resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
state, path = small_state(1), Path(sys.argv[1])
print(save(state, path, engine="uring").stats.engine, equal(load(state, path, engine="uring"), state))
"""


def test_small_memlock_limit(tmp_path: Path) -> None:
    """Root is exempt from the limit while it has the capability."""
    assert run_python(UNDER_A_SMALL_LIMIT, str(tmp_path), without=("ipc_lock",)) == "uring True\n"
