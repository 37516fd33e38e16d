"""Whether an installed dcpring works: it saves, loads and finds damage, also in the background and as a command.

    python tests/smoke.py [FOLDER]

It needs torch and tqdm, and nothing of the tree that it lies in: a dcpring from elsewhere than this interpreter's
environment is an error. FOLDER, which is made, holds its checkpoints; without one they are in a temporary folder.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import dcpring
from dcpring import _C

warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")


def state(fill: bool) -> dict[str, object]:
    random = torch.Generator().manual_seed(7)
    return {
        "weight": torch.randn(300_000, generator=random) if fill else torch.zeros(300_000),
        "half": torch.randn(700, 3, generator=random).bfloat16() if fill else torch.zeros(700, 3).bfloat16(),
        "nested": {"step": 7 if fill else 0, "name": "a" if fill else ""},
    }


def same(one: dict[str, object], other: dict[str, object]) -> bool:
    tensors = all(torch.equal(one[key], other[key]) for key in ("weight", "half"))  # type: ignore[arg-type]
    return tensors and one["nested"] == other["nested"]


def loaded(reader: dcp.StorageReader, planner: dcp.LoadPlanner) -> dict[str, object]:
    found = state(fill=False)
    dcp.load(found, storage_reader=reader, planner=planner, no_dist=True)
    return found


def check_origin() -> None:
    where, version = Path(dcpring.__file__), importlib.metadata.version("dcpring")
    assert where.is_relative_to(sys.prefix), f"{where} is not in {sys.prefix}"
    assert version == dcpring.__version__, f"its metadata is of {version}, the package is {dcpring.__version__}"


def check_round_trips(folder: Path) -> None:
    for engine in ("auto", "threads"):
        writer = dcpring.RingWriter(folder / engine, engine=engine)
        dcp.save(state(fill=True), storage_writer=writer, planner=dcpring.RingSavePlanner(), no_dist=True)
        ours = loaded(dcpring.RingReader(folder / engine, engine=engine), dcpring.RingLoadPlanner())
        stock = loaded(dcp.FileSystemReader(folder / engine), dcp.DefaultLoadPlanner())
        assert same(ours, state(fill=True)) and same(stock, state(fill=True)), engine


def check_background(folder: Path) -> None:
    done = dcp.async_save(state(fill=True), storage_writer=dcpring.RingWriter(folder / "async"), no_dist=True)
    done.result()
    assert same(loaded(dcpring.RingReader(folder / "async"), dcpring.RingLoadPlanner()), state(fill=True))
    model = torch.nn.Linear(8, 8)
    with dcpring.Checkpointer(folder / "steps", {"model": model}) as checkpointer:
        checkpointer.save(1, blocking=False).wait()
        kept = model.weight.detach().clone()
        torch.nn.init.zeros_(model.weight)
        assert checkpointer.load().step == 1 and torch.equal(model.weight, kept)


def check_damage(folder: Path) -> None:
    """By the command line, which looks at a checkpoint that is whole too."""
    good, bad = folder / "async", folder / "auto"
    assert dcpring.verify(good).ok and dcpring.verify(bad).ok
    (data,) = bad.glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[content.index(state(fill=True)["weight"].numpy().tobytes()[:64])] ^= 1  # type: ignore[attr-defined]
    data.write_bytes(content)
    command = [Path(sys.prefix, "bin", "dcpring"), "verify", good, bad]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 1 and "weight" in told.stdout, told.stdout + told.stderr
    assert f"ok   {good}" in told.stdout and f"ok   {bad}" not in told.stdout, told.stdout


def check(folder: Path) -> None:
    check_origin()
    assert _C.crc32(b"123456789" * 99) == zlib.crc32(b"123456789" * 99)
    check_round_trips(folder)
    check_background(folder)
    check_damage(folder)
    python = sys.version.split()[0]
    print(f"dcpring {dcpring.__version__} works here, with torch {torch.__version__} and Python {python}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        check(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            check(Path(temporary))
