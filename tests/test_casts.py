"""Casts of a load: what rounds is a warning, what can lose values is an error, whatever reads."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _logs import logged
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from dcpring import Checkpointer, CheckpointError, RingHFWriter, RingLoadPlanner, RingReader, load_pretrained
from dcpring.base.casts import Loss, check_values, loss
from dcpring.integrations.install import install, uninstall
from dcpring.tools.convert import convert

# ---- by dtypes ----

FLOATS = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.float8_e4m3fn: 3}
"""Each has a smaller exponent than the one before."""

INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool)


@pytest.mark.parametrize("before", FLOATS, ids=str)
@pytest.mark.parametrize("after", FLOATS, ids=str)
def test_floats(before: torch.dtype, after: torch.dtype) -> None:
    assert loss(before, after) == (Loss.RANGE if FLOATS[before] < FLOATS[after] else Loss.NOTHING)


@pytest.mark.parametrize("before", INTS, ids=str)
@pytest.mark.parametrize("after", INTS, ids=str)
def test_integers(before: torch.dtype, after: torch.dtype) -> None:
    ends = (0, 1) if before == torch.bool else (torch.iinfo(before).min, torch.iinfo(before).max)
    stay = torch.tensor(ends, dtype=before).to(after).tolist() == list(ends)
    assert loss(before, after) == (Loss.NOTHING if stay else Loss.RANGE)


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (torch.float32, torch.bfloat16, Loss.ROUNDS),
        (torch.bfloat16, torch.float32, Loss.NOTHING),
        (torch.float16, torch.bfloat16, Loss.ROUNDS),
        (torch.bfloat16, torch.float16, Loss.RANGE),
        (torch.float16, torch.float8_e5m2, Loss.ROUNDS),
        (torch.float8_e5m2, torch.float16, Loss.NOTHING),
        (torch.float8_e4m3fn, torch.float8_e5m2, Loss.ROUNDS),
        (torch.float8_e4m3fn, torch.float8_e4m3fnuz, Loss.RANGE),
        (torch.float8_e8m0fnu, torch.bfloat16, Loss.NOTHING),
        (torch.float32, torch.float8_e8m0fnu, Loss.RANGE),  # which has no zero, and no sign
        (torch.int64, torch.float32, Loss.ROUNDS),
        (torch.int64, torch.float16, Loss.RANGE),
        (torch.int16, torch.float16, Loss.ROUNDS),
        (torch.uint16, torch.float16, Loss.RANGE),  # 65535 is infinity there
        (torch.int32, torch.float64, Loss.NOTHING),
        (torch.bool, torch.float8_e4m3fn, Loss.NOTHING),
        (torch.float8_e4m3fn, torch.int64, Loss.RANGE),
        (torch.float32, torch.complex64, Loss.NOTHING),
        (torch.float64, torch.complex64, Loss.RANGE),
        (torch.complex64, torch.complex32, Loss.RANGE),
        (torch.complex64, torch.float64, Loss.RANGE),
        (torch.bits8, torch.float32, Loss.RANGE),  # of which torch says nothing
        (torch.float4_e2m1fn_x2, torch.float32, Loss.RANGE),
    ],
    ids=str,
)
def test_others(before: torch.dtype, after: torch.dtype, what: Loss) -> None:
    assert loss(before, after) == what


# ---- of a load ----


def _load(path: Path, state: dict[str, Any], planner: Any, **options: Any) -> str:
    """What goes wrong."""
    try:
        dcp.load(state, storage_reader=RingReader(path, **options), planner=planner(), no_dist=True)
    except CheckpointException as error:
        return str(error.failures[0][0])
    return ""


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def _made_by_torch(path: Path, state: dict[str, Tensor]) -> None:
    dcp.save(state, storage_writer=FileSystemWriter(path), no_dist=True)


def _made_by_safetensors(path: Path, state: dict[str, Tensor]) -> None:
    path.mkdir()
    save_file(state, path / "model.safetensors")


@pytest.mark.parametrize("planner", [RingLoadPlanner, DefaultLoadPlanner])
@pytest.mark.parametrize("made_by", [_made_by_torch, _made_by_safetensors])
def test_no_value_is_lost_unless_that_was_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, made_by: Any, planner: Any
) -> None:
    made_by(tmp_path / "c", {"a": torch.tensor([1e10, 1.0]), "b": torch.tensor([300]), "c": torch.ones(2)})
    for state in (
        {"c": torch.zeros(2), "a": torch.zeros(2, dtype=torch.float16)},
        {"c": torch.zeros(2), "b": torch.zeros(1, dtype=torch.int8)},
    ):
        key, target = list(state.items())[1]
        text = _load(tmp_path / "c", state, planner)
        assert f"'{key}'" in text and str(target.dtype) in text and 'casts="any"' in text
        assert "torch.int64" in text or "torch.float32" in text
        assert not state["c"].any(), "checks come before the first byte"
    assert not _warnings(caplog)
    both = {"a": torch.zeros(2, dtype=torch.float16), "b": torch.zeros(1, dtype=torch.int8)}
    assert not _load(tmp_path / "c", both, planner, casts="any")
    assert both["a"].tolist() == [float("inf"), 1] and both["b"].tolist() == [44]
    (line,) = _warnings(caplog)
    assert "from torch.float32 to torch.float16, which can lose values: 'a'" in line and "'b'" in line


def test_what_rounds_is_said_once_a_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _made_by_torch(tmp_path, {"a": torch.rand(5), "b": torch.rand(5), "c": torch.arange(5), "d": torch.ones(5)})
    state = {key: torch.zeros(5, dtype=torch.bfloat16) for key in "ab"}
    state |= {"c": torch.zeros(5), "d": torch.zeros(5, dtype=torch.float64)}
    with caplog.at_level(logging.INFO, "dcpring"):
        assert not _load(tmp_path, state, RingLoadPlanner)
    (line,) = _warnings(caplog)
    assert "from torch.float32 to torch.bfloat16, which rounds: 'a', 'b'" in line
    assert "from torch.int64 to torch.float32, which rounds: 'c'" in line
    assert "cast from torch.float32 to torch.float64: 'd'" in caplog.messages


def cast_by_ranks(folder: Path) -> list[list[str]]:
    """What this rank warns of in two loads; the last of the ranks casts a pair of dtypes that no other does."""
    saved = {"a": torch.rand(5), "b": torch.arange(5)}
    dcp.save(saved, storage_writer=FileSystemWriter(folder))
    told = []
    for _ in range(2):
        state: dict[str, Tensor] = {"a": torch.zeros(5, dtype=torch.bfloat16)}
        if dist.get_rank() == dist.get_world_size() - 1:
            state["b"] = torch.zeros(5)
        with logged() as texts:
            dcp.load(state, storage_reader=RingReader(folder), planner=RingLoadPlanner())
        told.append([text for text in texts if "which rounds" in text])
    return told


def test_casts_are_told_once_a_job(tmp_path: Path) -> None:
    """Each rank of a thousand warned of the same."""
    told = _distributed.run(3, cast_by_ranks, tmp_path / "c")
    for load in range(2):
        texts = [text for rank in told for text in rank[load]]
        assert sum("from torch.float32 to torch.bfloat16, which rounds: 'a'" in text for text in texts) == 1
        assert sum("from torch.int64 to torch.float32, which rounds: 'b'" in text for text in texts) == 1


def test_the_old_name(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match='casts="round"'):
        reader = RingReader(tmp_path, casts="safe")
    assert reader.policy.casts == "round"


def test_installed_loads_go_on_as_torchs_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _made_by_torch(tmp_path, {"a": torch.tensor([300])})
    state = {"a": torch.zeros(1, dtype=torch.int8)}
    install()
    try:
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    finally:
        uninstall()
    assert state["a"].tolist() == [44]
    assert ["can lose values" in line for line in _warnings(caplog)] == [True]


# ---- of a Checkpointer ----


def test_a_checkpointer_refuses_or_reports(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {"model": nn.Linear(2, 2)}) as checkpointer:
        checkpointer.save(1)
    refused = pytest.raises(CheckpointError, match=r"'model\.weight': .*torch\.float32.*torch\.float16.*lose")
    with Checkpointer(tmp_path, {"model": nn.Linear(2, 2).half()}) as checkpointer, refused:
        checkpointer.load()
    with Checkpointer(tmp_path, {"model": nn.Linear(2, 2).half()}, reader_options={"casts": "any"}) as checkpointer:
        assert "2 tensors cast from float32 to float16, which can lose values" in str(checkpointer.load())
    with Checkpointer(tmp_path, {"model": nn.Linear(2, 2).bfloat16()}) as checkpointer:
        assert "2 tensors cast from float32 to bfloat16, which rounds" in str(checkpointer.load())


def test_load_pretrained(tmp_path: Path) -> None:
    _made_by_safetensors(tmp_path / "c", nn.Linear(2, 2).state_dict())
    with pytest.raises(CheckpointError, match=r"'weight'.*torch\.float32.*torch\.float16.*lose"):
        load_pretrained(nn.Linear(2, 2).half(), tmp_path / "c")
    load_pretrained(nn.Linear(2, 2).half(), tmp_path / "c", reader_options={"casts": "any"})


# ---- that were asked for ----


def test_values_that_a_chosen_dtype_does_not_have() -> None:
    check_values("a", torch.tensor([65519.0, float("inf"), float("nan"), -65504.0]), torch.float16)
    for value in (65520.0, -1e10):
        with pytest.raises(CheckpointError, match=r"'a' has values that torch\.float16 does not have"):
            check_values("a", torch.tensor([1.0, value]), torch.float16)
    with pytest.raises(CheckpointError, match="float8_e8m0fnu"):
        check_values("a", torch.zeros(1), torch.float8_e8m0fnu)
    with pytest.raises(CheckpointError, match="float8_e4m3fn"):
        check_values("a", torch.full((2,), 57344.0).to(torch.float8_e5m2), torch.float8_e4m3fn)


def test_a_conversion_or_an_export_to_a_smaller_dtype(tmp_path: Path) -> None:
    state = {"good": torch.rand(4), "bad": torch.tensor([1e10, 1.0])}
    _made_by_torch(tmp_path / "c", state)
    with pytest.raises(CheckpointError, match=r"'bad' has values that torch\.float16 does not have"):
        convert(tmp_path / "c", tmp_path / "x.safetensors", dtype="fp16")
    assert not (tmp_path / "x.safetensors").exists()
    convert(tmp_path / "c", tmp_path / "x.safetensors", dtype="fp16", exclude="bad")
    with pytest.raises(CheckpointException, match=r"'bad' has values that torch\.float16 does not have"):
        dcp.save(state, storage_writer=RingHFWriter(tmp_path / "hf", dtype=torch.float16), no_dist=True)
    del state["bad"]
    dcp.save(state, storage_writer=RingHFWriter(tmp_path / "hf", dtype=torch.float16), no_dist=True)
