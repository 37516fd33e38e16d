"""Ctrl-C and fork, in the middle of a save or a load."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fault._support import data_files, equal, load, python_command, python_environment, run_python, save, tensor_state

ANSWER_SECONDS = 0.2
"""What is promised."""

SLACK_SECONDS = 0.8
"""For a machine on which other tests run too."""

STATE = """
import os, signal, sys, threading, time
from fault._support import Path, _C, RingReader, data_files, dcp, equal, load, needed_files, open_descriptors, save
from fault._support import tensor_state, torch

path = Path(sys.argv[1])
options = {"engine": sys.argv[2], "queue_depth": 2, "block_size_bytes": 1 << 20}
small = tensor_state(1)
big = {f"weight.{n}": torch.full((16 << 20,), n, dtype=torch.int32) for n in range(4)}
DELAY_MS = 20  # of each of 256 transfers: there is time for the signal, however fast the disk


def slowly(call, delay_ms=DELAY_MS):
    _C.arm_fault(call, 1, 0, True, delay_ms)


def interrupted(action, begun):
    # Interrupts once there are signs that it has begun; the seconds from the signal to the exception.
    sent = []

    def interrupt():
        while not begun():
            time.sleep(0.005)
        time.sleep(0.03)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        action()
    except BaseException as error:
        answered = time.monotonic()
        assert sent, f"failed before the signal: {error!r}"
        causes = [pair[0] for pair in getattr(error, "failures", {0: (error, None)}).values()]
        assert any(isinstance(cause, KeyboardInterrupt) for cause in causes), repr(error)
        return answered - sent[0]
    raise AssertionError("was over before the signal came; the test needs more data")
"""

SAVE = (
    STATE
    + """
save(small, path, **options)
before = data_files(path)
slowly({"uring": "uring_submit", "threads": "pwrite"}[sys.argv[2]])
seconds = interrupted(lambda: save(big, path, **options), lambda: data_files(path) != before)
_C.disarm_fault()
assert data_files(path) == before, "the partial file is left"
assert equal(load(small, path), small), "the old checkpoint is gone"
save(big, path, **options)
assert {entry.name for entry in path.iterdir()} == needed_files(path)
assert equal(load(big, path), big)
print(seconds)
"""
)

SYNC = (
    STATE
    + """
NANOSLEEP = {"x86_64": ("35", "230"), "aarch64": ("101", "115")}[os.uname().machine]


def syncing():
    return any(Path(f"/proc/self/task/{task}/syscall").read_text().split()[0] in NANOSLEEP
               for task in os.listdir("/proc/self/task"))


save(small, path, **options)
before = data_files(path)
slowly("fdatasync", 4000)
seconds = interrupted(lambda: save(small, path, **options), syncing)
_C.disarm_fault()
assert data_files(path) == before, "the partial file is left"
assert equal(load(small, path), small), "the old checkpoint is gone"
save(small, path, **options)
print(seconds)
"""
)

LOAD = (
    STATE
    + """
save(big, path, **options)
target = {key: torch.zeros_like(value) for key, value in big.items()}
reader = lambda: dcp.load(target, storage_reader=RingReader(path, **options), no_dist=True)
slowly({"uring": "uring_submit", "threads": "pread"}[sys.argv[2]])
descriptors = open_descriptors()
seconds = interrupted(reader, lambda: bool(target["weight.1"][0] == 1))
_C.disarm_fault()
assert open_descriptors() == descriptors
assert not equal(target, big), "was over before the signal came"
reader()
assert equal(target, big)
print(seconds)
"""
)


TOO_LATE = "was over before the signal came"


def in_time(attempt: Callable[[int], float], limit: float) -> float:
    """The better of two answers, on a busy machine, where the thread that sends the signal may also come too late."""
    answers: list[float] = []
    for number in range(10):
        try:
            answers.append(attempt(number))
        except AssertionError as error:
            if TOO_LATE not in str(error):
                raise
        if len(answers) == 2 or min(answers, default=limit) < limit:
            return min(answers)
    raise AssertionError(f"ten times it {TOO_LATE}")


@pytest.mark.slow(but=["save-uring", "sync-threads", "load-uring"])
@pytest.mark.parametrize("engine", ("uring", "threads"))
@pytest.mark.parametrize("script", (SAVE, SYNC, LOAD), ids=("save", "sync", "load"))
def test_interrupt(tmp_path: Path, engine: str, script: str, record_property: pytest.RecordProperty) -> None:
    limit = ANSWER_SECONDS + SLACK_SECONDS
    seconds = in_time(lambda attempt: float(run_python(script, str(tmp_path / f"checkpoint{attempt}"), engine)), limit)
    record_property("answered_after_seconds", seconds)
    print(f"answered after {seconds:.3f} s; promised are {ANSWER_SECONDS} s")
    assert seconds < limit


LOOP = """
import sys
from fault._support import Path, load, save, tensor_state

state, path = tensor_state(1, mib=8, count=4), Path(sys.argv[1])
save(state, path)
print("begun", flush=True)
while True:
    save(state, path) if sys.argv[2] == "save" else load(state, path)
"""


DROPPED = b"Exception ignored in"


@contextmanager
def looping(path: Path, what: str, said: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program that saves or loads until it is stopped; what it says as an error is in the file ``said``."""
    with (
        said.open("wb") as stderr,
        subprocess.Popen(
            python_command(LOOP, str(path), what), stdout=subprocess.PIPE, stderr=stderr, env=python_environment()
        ) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            yield process
        finally:
            process.kill()


def _interrupt(process: subprocess.Popen[bytes], said: Path, most: int = 3) -> int:
    """Presses Ctrl-C until the program ends, and says how often: Python itself drops what is raised in a destructor.

    It says so, and then the next one is due.
    """
    for presses in range(1, most + 1):
        process.send_signal(signal.SIGINT)
        patience = time.monotonic() + 60
        while process.poll() is None and said.read_bytes().count(DROPPED) < presses:
            assert time.monotonic() < patience, f"interrupt {presses} was not answered"
            time.sleep(0.01)
        if process.poll() is not None:
            return presses
    raise AssertionError(f"{most} interrupts did not end the program")


@pytest.mark.parametrize("what", ("save", "load"))
def test_interrupt_ends_the_program(tmp_path: Path, what: str) -> None:
    """As a user's Ctrl-C does, from outside; the checkpoint is whole."""
    path = tmp_path / "checkpoint"
    said = tmp_path / "said"
    with looping(path, what, said) as process:
        time.sleep(0.5)
        presses = _interrupt(process, said)
        assert process.returncode != 0
    told = said.read_bytes()
    assert b"KeyboardInterrupt" in told
    assert told.count(DROPPED) >= presses - 1, told.decode()
    state = tensor_state(1, mib=8, count=4)
    assert equal(load(state, path), state)
    save(state, path)
    assert len(data_files(path)) == 1


FORK = """
import os, sys, threading, time
from fault._support import Path, _C, data_files, equal, load, needed_files, save, tensor_state, torch

torch.set_num_threads(1)
path = Path(sys.argv[1])
old, big = tensor_state(1), tensor_state(2, mib=64, count=4)
save(old, path)
before = data_files(path)
_C.arm_fault(None, 1, 0, True, 5)  # every call takes longer: there is time for the forks, however busy the machine
saving = threading.Thread(target=save, args=(big, path))
saving.start()
while data_files(path) == before:
    time.sleep(0.001)
children = 0
while saving.is_alive() and children < 10:
    child = os.fork()
    if child == 0:
        # Has a half-written file, rings and threads of its parent's in memory, none of which are its own.
        import gc
        del saving
        gc.collect()
        mine = path.with_name(f"child{children}")
        save(old, mine)
        assert equal(load(old, mine), old)
        sys.exit(0)  # with all destructors
    children += 1
    pid, status = os.waitpid(child, 0)
    assert status == 0, status
_C.disarm_fault()
saving.join()
assert children > 0
assert equal(load(big, path), big)
assert {entry.name for entry in path.iterdir()} == needed_files(path)
print(children)
"""


def test_fork_during_a_save(tmp_path: Path) -> None:
    """The child can save and load, and takes nothing from its parent."""
    assert int(run_python(FORK, str(tmp_path / "checkpoint"), is_new=True)) > 0


FORK_AFTER = """
import os, sys
from fault._support import Path, equal, load, save, tensor_state, torch

torch.set_num_threads(1)
path, state = Path(sys.argv[1]), tensor_state(1)
for engine in ("uring", "threads"):
    writer = save(state, path, engine=engine)
    assert equal(load(state, path, engine=engine), state)
    child = os.fork()
    if child == 0:
        save(state, path.with_name("child"), engine=engine)
        assert equal(load(state, path, engine=engine), state)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert equal(load(state, path.with_name("child"), engine=engine), state)
print("worked")
"""


def test_fork_after_use(tmp_path: Path) -> None:
    assert run_python(FORK_AFTER, str(tmp_path / "checkpoint"), is_new=True) == "worked\n"


def test_a_pending_signal_does_not_get_lost(tmp_path: Path) -> None:
    """A handler that raises an exception of its own has that exception come out of the save."""

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    previous = signal.signal(signal.SIGALRM, stop)
    state = tensor_state(1, mib=64, count=4)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(BaseException) as caught:
            while True:
                save(state, tmp_path / "checkpoint")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    failures = getattr(caught.value, "failures", {0: (caught.value, None)})
    assert isinstance(failures[0][0], Stop)


EXIT = """
import sys, threading, time
from fault._support import Path, _C, torch

path, what = Path(sys.argv[1]), sys.argv[2]
options = ("threads", 0, 4, 1 << 20, 4, True, False, None)
data = torch.ones(64 << 20, dtype=torch.uint8)
with open(path / "there", "wb") as file:
    file.truncate(data.nbytes)


def save():
    _C.FileWriter(str(path), "file", 0, options).write_tensors(_C.Tensors([data]), _C.StorageIndex(1))


def load():
    _C.load_bytes(_C.Input(str(path), ["there"]), [(0, 0, data.nbytes, None)], options)


def deep(depth):  # as below a framework's callbacks: the stack is given back when the thread ends
    {"save": save, "load": load}[what]() if depth == 0 else list(map(deep, [depth - 1]))


_C.arm_fault({"save": "pwrite", "load": "pread"}[what], 1, 0, True, 50)  # a slow disk
threading.Thread(target=deep, args=(200,), daemon=True).start()
time.sleep(0.3)
print("over", flush=True)
"""


@pytest.mark.parametrize("what", ("save", "load"))
def test_exit_in_the_middle_of_a_daemon_threads_call(tmp_path: Path, what: str) -> None:
    """Python ends such a thread inside of the core, which must not go before its workers."""
    assert run_python(EXIT, str(tmp_path), what, is_new=True) == "over\n"
