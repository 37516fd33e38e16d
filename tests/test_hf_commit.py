"""How RingHFWriter puts a model into a directory that holds another: under which names, what a kill leaves for whoever
looks, and what becomes of two that save at a time."""

from __future__ import annotations

import errno
import glob
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _distributed import run
from fault._support import fault
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

import dcpring
from dcpring import _C, CheckpointError, RingHFReader, RingHFWriter, RingLoadPlanner, RingSavePlanner
from dcpring.hf import commit as committing
from dcpring.store import one_saver
from dcpring.store.one_saver import LOCK_NAME, OneSaver

SEVERAL = 100
"""Bytes in a file, so that each tensor has its own."""


def state_of(number: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((20,), float(number)) for name in "abcd"}


def save(path: Path, number: int, planner: Any = None, **options: Any) -> None:
    writer = RingHFWriter(path, **options)
    dcp.save(state_of(number), storage_writer=writer, planner=planner or RingSavePlanner(), no_dist=True)


def number_in(path: Path, **options: Any) -> float:
    """Which state a directory loads, all of it."""
    state = state_of(-1)
    dcp.load(state, storage_reader=RingHFReader(path, **options), planner=RingLoadPlanner(), no_dist=True)
    (number,) = {value for tensor in state.values() for value in tensor.tolist()}
    return float(number)


# ---- names ----


@pytest.mark.parametrize("limit", [5 << 30, SEVERAL])
@pytest.mark.parametrize(
    "options, expected",
    [
        ({"variant": "fp16"}, ("model.fp16", "model.safetensors.index.fp16.json")),
        ({"name": "adapter_model"}, ("adapter_model", "adapter_model.safetensors.index.json")),
        (
            {"name": "diffusion_pytorch_model", "variant": "fp16"},
            ("diffusion_pytorch_model.fp16", "diffusion_pytorch_model.safetensors.index.fp16.json"),
        ),
    ],
)
def test_names_and_variants(tmp_path: Path, limit: int, options: dict[str, str], expected: tuple[str, str]) -> None:
    """As transformers and diffusers have them; what has another name stays."""
    save(tmp_path, 1)
    for number in (2, 3):
        save(tmp_path, number, max_shard_bytes=limit, **{"name": "model", **options})
        stem, index = expected
        files = (
            [f"{stem}.safetensors"]
            if limit > SEVERAL
            else [f"{stem}-0000{n}-of-00004.safetensors" for n in range(1, 5)]
        )
        assert set(os.listdir(tmp_path)) == {"model.safetensors", *files, *([index] if len(files) > 1 else [])}
        assert number_in(tmp_path, **options) == number
        assert number_in(tmp_path) == 1
    (tmp_path / "model.safetensors").unlink()
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(20)) for name in "abcd"})
    assert not dcpring.load_pretrained(model, tmp_path, **options)  # type: ignore[arg-type]
    assert number_in(tmp_path) == 3, "the only one there is"


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"no model.fp8.safetensors and no .*; there is model.safetensors"):
        RingHFReader(tmp_path, variant="fp8").read_metadata()
    with pytest.raises(CheckpointError, match=r"no other.safetensors"):
        dcpring.load_pretrained(torch.nn.Linear(2, 2), tmp_path, name="other")


@pytest.mark.parametrize("kind", [RingHFReader, RingHFWriter])
@pytest.mark.parametrize("options", [{"name": ""}, {"name": "a/b"}, {"variant": "../x"}, {"variant": ""}])
def test_names_that_cannot_be(tmp_path: Path, kind: Any, options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        kind(tmp_path, **options)


@pytest.mark.parametrize(
    "there",
    ["adapter_model.safetensors", "diffusion_pytorch_model.safetensors.index.json", "x-00001-of-00002.safetensors"],
)
def test_weights_of_another_name_are_not_left_beside(tmp_path: Path, there: str) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / there)
    with pytest.raises(CheckpointException, match=rf"weights under another name, {there}.*pass name="):
        save(tmp_path, 1)
    assert os.listdir(tmp_path) == [there]
    save(tmp_path, 1, name="model")
    save(tmp_path, 2)
    assert set(os.listdir(tmp_path)) == {there, "model.safetensors"}


@pytest.mark.parametrize(
    "name, cure",
    [
        ("pytorch_model.bin", "dcpring convert .*pytorch_model.bin NEW/model.safetensors"),
        ("m-Q4.gguf", "gguf_file='m-Q4.gguf'"),
    ],
)
def test_weights_of_another_kind(tmp_path: Path, name: str, cure: str) -> None:
    (tmp_path / name).write_bytes(b"weights")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match=f"holds no safetensors, but .*{cure}"):
            RingHFReader(path).read_metadata()


# ---- what is killed ----


class Killed(BaseException):
    pass


class KilledAt:
    """Stands in for the core: the process ends before the call of this number."""

    def __init__(self, nth: int) -> None:
        self._left = nth

    def __getattr__(self, name: str) -> Any:
        call = getattr(_C, name)
        if not callable(call) or isinstance(call, type):
            return call

        def counted(*arguments: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                raise Killed
            return call(*arguments)

        return counted


def by_glob(path: Path) -> set[float]:
    """What programs get that take all files of this name."""
    files = {file for pattern in ("*.safetensors", "model*.safetensors") for file in glob.glob(f"{path}/{pattern}")}
    files |= {str(file) for file in path.glob("*.safetensors")}
    return {value for file in files for tensor in load_file(file).values() for value in tensor.tolist()}


@pytest.mark.parametrize("before", [5 << 30, SEVERAL])
def test_a_kill_leaves_nothing_that_is_taken_for_the_model(tmp_path: Path, before: int) -> None:
    """Of the old model or of the new one, and never of both; nor is the new one seen before it is committed."""
    seen = []
    for nth in range(1000):
        path = tmp_path / str(nth)
        save(path, 1, max_shard_bytes=before)
        try:
            with mock.patch.object(committing, "_C", KilledAt(nth)):
                save(path, 2, max_shard_bytes=SEVERAL)
            break
        except (Killed, CheckpointException):
            number = number_in(path)
            assert by_glob(path) <= {number}, os.listdir(path)
            seen.append(number)
        save(path, 3, max_shard_bytes=SEVERAL)
        assert number_in(path) == 3 and by_glob(path) == {3}
        assert len(os.listdir(path)) == 5, "four files and the index, under their usual names"
    assert seen == sorted(seen) and set(seen) == {1, 2}


def test_files_that_cannot_have_two_names(tmp_path: Path) -> None:
    save(tmp_path, 1, max_shard_bytes=SEVERAL)
    with fault("link", 2, errno.EPERM):
        save(tmp_path, 2, max_shard_bytes=SEVERAL)
    assert number_in(tmp_path) == 2
    index, folder = (
        "model.safetensors.index.json",
        {name for name in os.listdir(tmp_path) if name.startswith(".model.")},
    )
    assert set(os.listdir(tmp_path)) == {index, *folder} and len(folder) == 1
    assert {
        Path(file).parent.name for file in json.loads((tmp_path / index).read_text())["weight_map"].values()
    } == folder
    assert not dcpring.verify(tmp_path).problems
    save(tmp_path, 3)
    assert number_in(tmp_path) == 3 and os.listdir(tmp_path) == ["model.safetensors"]


# ---- two at a time ----


class Holding(RingSavePlanner):
    """Waits, with all that is planned, until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_there, self.may_go = threading.Event(), threading.Event()

    def finish_plan(self, plan: Any) -> Any:
        self.is_there.set()
        assert self.may_go.wait(60)
        return super().finish_plan(plan)


@pytest.mark.parametrize("limit", [5 << 30, SEVERAL])
def test_the_second_is_told_of_the_first(tmp_path: Path, limit: int) -> None:
    planner = Holding()
    first = threading.Thread(target=save, args=(tmp_path, 1, planner), kwargs={"max_shard_bytes": limit})
    first.start()
    assert planner.is_there.wait(60)
    try:
        with pytest.raises(CheckpointException, match=f"another save into .* by process {os.getpid()} on"):
            save(tmp_path, 2, max_shard_bytes=limit)
    finally:
        planner.may_go.set()
        first.join(60)
    assert number_in(tmp_path) == 1
    save(tmp_path, 3, max_shard_bytes=limit)
    assert number_in(tmp_path) == 3 and LOCK_NAME not in os.listdir(tmp_path)


def test_another_process(tmp_path: Path) -> None:
    hold = "import sys, pathlib; from dcpring.store.one_saver import OneSaver; s = OneSaver(pathlib.Path(sys.argv[1]));"
    hold += "print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(CheckpointException, match=f"another save into .* by process {other.pid} on"):
            save(tmp_path, 1)
        other.kill()
    save(tmp_path, 1)
    assert os.listdir(tmp_path) == ["model.safetensors"], "who was killed holds nothing"


def test_a_save_that_has_failed_is_in_nobodys_way(tmp_path: Path) -> None:
    """Nor one that DCP has given up without a word to its storage, as another rank has failed."""
    writer = RingHFWriter(tmp_path)
    with (
        mock.patch.object(RingHFWriter, "finish", side_effect=OSError(5, "broken")),
        pytest.raises(CheckpointException),
    ):
        dcp.save(state_of(1), storage_writer=writer, planner=RingSavePlanner(), no_dist=True)
    assert writer._saver is not None
    save(tmp_path, 2)
    kept = [writer]
    ended = threading.Thread(target=lambda: kept.append(OneSaver(tmp_path)))  # type: ignore[arg-type]
    ended.start()
    ended.join()
    save(tmp_path, 3)
    assert number_in(tmp_path) == 3 and os.listdir(tmp_path) == ["model.safetensors"]


def test_without_locks(tmp_path: Path) -> None:
    with mock.patch.object(one_saver.fcntl, "flock", side_effect=OSError(errno.ENOSYS, "no locks")):
        save(tmp_path, 1)
    assert number_in(tmp_path) == 1 and os.listdir(tmp_path) == ["model.safetensors"]


def save_twice(path: str) -> None:
    for number in (1, 2):
        dcp.save(
            state_of(number), storage_writer=RingHFWriter(path, max_shard_bytes=SEVERAL), planner=RingSavePlanner()
        )


def test_several_ranks(tmp_path: Path) -> None:
    run(2, save_twice, str(tmp_path))
    assert number_in(tmp_path) == 2 and len(os.listdir(tmp_path)) == 5
