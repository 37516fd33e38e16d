"""kill -9 at any moment of an overwrite: the directory holds exactly the old checkpoint, or exactly the new one.

So it is with directories of safetensors.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fault._support import run_python

KILLS = 50

# Runs in a process of its own, whose forked children have torch loaded already.
KILLER = """
import json, os, random, signal, sys, time
import fault._support
from fault._support import Path, equal, load, tensor_state, torch

torch.set_num_threads(1)
path, kills, options = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
kind = ("save_model", "load_model", "model_files") if options.pop("safetensors", False) else (
    "save", "stock_load", "needed_files")
save, stock_load, needed_files = (getattr(fault._support, name) for name in kind)
states = [tensor_state(seed, mib=5, count=3) for seed in (1, 2)]
save(states[0], path, **options)
current, random_delay = 0, random.Random(0)


def start(state):
    # The time is counted from when the child begins to save.
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b"x")
        save(state, path, **options)
        os._exit(0)
    os.read(ready, 1)
    os.close(ready)
    os.close(tell)
    return child


def whole_save():
    begin = time.monotonic()
    os.waitpid(start(states[current]), 0)
    return time.monotonic() - begin


duration = sorted(whole_save() for _ in range(5))[2]
counts = {"old": 0, "new": 0, "killed": 0}
for number in range(10 * kills):
    if counts["killed"] == kills:
        break
    child = start(states[1 - current])
    time.sleep(random_delay.uniform(0, 1.1) * duration)
    os.kill(child, signal.SIGKILL)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    counts["killed"] += killed
    # A save that had ended says that the machine has become faster, one that had not, perhaps slower.
    duration *= 1.05 if killed else 0.9
    loaded = load(states[0], path)
    is_old, is_new = (equal(loaded, states[i]) for i in (current, 1 - current))
    assert is_old != is_new, f"kill {number}: neither the old nor the new checkpoint"
    assert number % 10 or equal(stock_load(states[0], path), loaded)
    counts["new" if is_new else "old"] += 1
    current = 1 - current if is_new else current
save(states[1 - current], path, **options)
assert equal(load(states[0], path), states[1 - current])
assert {entry.name for entry in path.iterdir()} == needed_files(path), "rubbish is left"
print(json.dumps(counts))
"""


@pytest.mark.slow(but=["default", "model of several files"])
@pytest.mark.parametrize(
    ("kills", "options"),
    (
        (KILLS, {}),
        (15, {"engine": "threads", "direct": False, "sync_files": False}),
        (15, {"single_file_per_rank": False, "block_size_bytes": 1 << 20}),
        (25, {"safetensors": True}),
        (25, {"safetensors": True, "max_shard_bytes": 6 << 20}),
    ),
    ids=("default", "threads", "files", "model", "model of several files"),
)
def test_killed_while_overwriting(tmp_path: Path, kills: int, options: dict[str, object]) -> None:
    counts = json.loads(run_python(KILLER, str(tmp_path / "checkpoint"), str(kills), json.dumps(options), timeout=300))
    assert counts["killed"] == kills, "most saves had ended before they were killed"
    assert counts["old"] > 0
