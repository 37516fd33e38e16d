"""How many system calls a save of a few small tensors makes: on a network file system, each is a round trip or more."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcpring import _C, RingReader, RingWriter

STATE = {f"t{number}": torch.full((1000,), float(number)) for number in range(4)}
ROUNDS = 5

CALLS = {
    **{"mkdir": 1, "open_dir": 5, "open_below": 2, "pwrite": 2, "fdatasync": 1, "fsync": 4, "rename": 1},
    **{"close": 7, "statfs": 1},
}
"""Of the core. Two files are written, and the directory is opened for each; it is synced when its files are written,
with the one above, and when the metadata has its name. What file system it is on is asked once."""


def _save(path: Path) -> None:
    dcp.save(STATE, storage_writer=RingWriter(path))


def test_calls_of_the_core(tmp_path: Path) -> None:
    _save(tmp_path / "warm")
    made = {}
    for call in _fallible():
        _C.arm_fault(call, 0, 0, False, 0, True)
        try:
            _save(tmp_path / call)
        finally:
            made[call] = _C.disarm_fault()
    assert {call: count for call, count in made.items() if count} == CALLS
    state = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    dcp.load(state, storage_reader=RingReader(tmp_path / "mkdir"))
    assert all(torch.equal(state[name], STATE[name]) for name in STATE)


def _fallible() -> list[str]:
    """The names of all calls of the core but those that no fault counts."""
    source = Path(__file__).parent.parent / "csrc/core/io/sys.h"
    return re.findall(r"CALL\((?!NEVER)\w+, [^,]+, (\w+),", source.read_text())


PROGRAM = """
import os, sys
from pathlib import Path
import torch.distributed.checkpoint as dcp
import test_small_saves
folder = Path(sys.argv[1])
for number in range(test_small_saves.ROUNDS):
    for kind, writer in ("ring", test_small_saves.RingWriter), ("stock", dcp.FileSystemWriter):
        os.write(2, f"BEGIN-{kind}".encode())
        dcp.save(test_small_saves.STATE, storage_writer=writer(folder / f"{kind}-{number}"))
        os.write(2, b"END")
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not there")
def test_calls_of_all(tmp_path: Path) -> None:
    """Of Python and of threads too. DCP notes each of its steps, with a random number and the number of the process."""
    log = tmp_path / "calls"
    traced = subprocess.run(
        ["strace", "-f", "-qq", "-o", log, sys.executable, "-c", PROGRAM, tmp_path],
        cwd=Path(__file__).parent, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True,
        text=True,
    )  # fmt: skip
    if "ptrace" in traced.stderr:
        pytest.skip(traced.stderr)
    assert traced.returncode == 0, traced.stderr
    ring, stock = _rounds(log.read_text(errors="replace"))
    logged = Counter({call: min(calls[call] for calls in stock) for call in ("getpid", "getrandom", "gettid")})
    best = min((calls - logged for calls in ring), key=Counter.total)
    assert best.total() <= 45, best


def _rounds(log: str) -> tuple[list[Counter[str]], list[Counter[str]]]:
    """What was called in each round. A wait for the disk that was only taken up again counts once."""
    found: dict[str, list[Counter[str]]] = {"ring": [], "stock": []}
    current: Counter[str] = Counter()
    for line in log.splitlines():
        if mark := re.search(r'write\(2, "(?:BEGIN-(\w+)|END)', line):
            current = Counter()
            if mark[1]:
                found[mark[1]].append(current)
        elif call := re.match(r"\d+ +(\w+)\(", line):
            current[call[1]] += 1
        if "ETIMEDOUT" in line:
            current["futex"] -= 1
    return found["ring"], found["stock"]
