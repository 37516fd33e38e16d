"""Arguments: what is mistyped is refused where it is given, a string is one string, and objects show theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dcpring import (
    Checkpointer,
    Rearrange,
    Replicated,
    RingHFReader,
    RingHFWriter,
    RingLoadPlanner,
    RingReader,
    RingSavePlanner,
    RingStager,
    RingWriter,
    convert,
    diff_checkpoints,
    install,
)
from dcpring.resume.checkpointer import try_options


class Mine(RingWriter):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)


@pytest.mark.parametrize(
    ("call", "said"),
    (
        (lambda path: RingWriter(path, worker=4), "RingWriter() has no argument 'worker'; did you mean 'workers'?"),
        (lambda path: Mine(path, over_write=4), "Mine() has no argument 'over_write'; did you mean 'overwrite'?"),
        (lambda path: RingReader(path, trused=True), "RingReader() has no argument 'trused'; did you mean 'trusted'?"),
        (lambda path: RingHFReader(path, trused=True), "RingHFReader() has no argument 'trused'; did you mean"),
        (lambda path: RingHFWriter(path, dtyp=1), "RingHFWriter() has no argument 'dtyp'; did you mean 'dtype'?"),
        (lambda path: RingHFWriter(path, overwrite=True), "RingHFWriter() has no argument 'overwrite'"),
        (lambda path: RingSavePlanner(writer=1), "RingSavePlanner() has no argument 'writer'; did you mean 'writers'?"),
        (
            lambda path: RingLoadPlanner(shares=1, x=2),
            "RingLoadPlanner() has no argument 'shares', nor 'x'; did you mean",
        ),
        (lambda path: RingStager(buffer=1), "RingStager() has no argument 'buffer'; did you mean 'buffers'?"),
        (
            lambda path: Checkpointer(path, {}, keep_lst=1),
            "Checkpointer() has no argument 'keep_lst'; did you mean 'keep_last'?",
        ),
        (
            lambda path: install(reader_options={"trused": 1}),
            "reader_options: RingReader() has no argument 'trused'; did",
        ),
        (
            lambda path: install(save_planner_options={"xyz": 1}),
            "save_planner_options: RingSavePlanner() has no argument 'xyz'",
        ),
    ),
)
def test_a_mistyped_option_names_what_was_called(tmp_path: Path, call: Callable[[Path], Any], said: str) -> None:
    with pytest.raises(TypeError) as caught:
        call(tmp_path)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    (
        (
            {"writer_options": {"worker": 4}},
            "writer_options: RingWriter() has no argument 'worker'; did you mean 'workers'?",
        ),
        ({"writer_options": {"workers": 400}}, "writer_options: workers=400: must be an int from 1 to 64"),
        ({"reader_options": {"trused": True}}, "reader_options: RingReader() has no argument 'trused'; did you mean"),
        ({"reader_options": {"casts": "all"}}, "reader_options: casts='all': must be one of"),
        ({"reader_options": {"safe_globals": "os.system"}}, "must be a list of classes and functions"),
        (
            {"export_options": {"dtpe": 1}},
            "export_options: RingHFWriter() has no argument 'dtpe'; did you mean 'dtype'?",
        ),
        ({"planner_options": {"writer": 1}}, "has no argument 'writer'; did you mean 'writers'?; it takes writers,"),
        ({"busy": "no"}, "busy='no': must be"),
        ({"keep_last": True}, "keep_last=True: must be an int of at least 1"),
    ),
)
def test_options_of_a_checkpointer_are_tried_when_they_are_given(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    """Those of the reader were found at the first load, days later."""
    for call in (
        lambda: Checkpointer(tmp_path, {"model": nn.Linear(2, 2)}, **options),
        lambda: try_options(options, "RingCheckpoint()"),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert said in str(caught.value)


def test_a_plug_names_itself_where_an_option_of_a_checkpointer_is_mistyped() -> None:
    with pytest.raises(TypeError, match=r"RingCheckpoint\(\) has no argument 'keep_lst'; did you mean 'keep_last'"):
        try_options({"keep_lst": 1}, "RingCheckpoint()")
    try_options({"keep_last": 3, "busy": "skip", "writer_options": {"workers": 2}, "timeout": 5}, "RingCheckpoint()")


class Plain:
    def __init__(self) -> None:
        self.value = 1

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def test_one_name_is_no_list_of_letters(tmp_path: Path) -> None:
    state = Plain()
    with Checkpointer(tmp_path, {"model": nn.Linear(2, 2), "state": Replicated(state)}) as checkpointer:
        checkpointer.save(torch.tensor(1))  # type: ignore[arg-type]
        state.value = 2
        checkpointer.load(exclude="state")
        assert state.value == 2
        checkpointer.load(components="state")
        assert state.value == 1
        with pytest.raises(TypeError, match=r"components=\[1\]: must be a string, or a list of strings"):
            checkpointer.load(components=[1])  # type: ignore[list-item]


def test_one_pattern_is_no_list_of_letters(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    dcp.save({"x": torch.ones(2), "y": torch.ones(2)}, storage_writer=RingWriter(a), no_dist=True)
    dcp.save({"x": torch.ones(2), "y": torch.zeros(2)}, storage_writer=RingWriter(b), no_dist=True)
    assert not diff_checkpoints(a, b, only="x")
    assert diff_checkpoints(a, b, only=["y"])
    assert convert(a, tmp_path / "c.safetensors", only="x").tensors == 1
    state = {"x": torch.zeros(2), "zzz.new": torch.zeros(2)}
    dcp.load(state, storage_reader=RingReader(a), planner=RingLoadPlanner(allow_missing="*.new"), no_dist=True)
    assert state["x"].eq(1).all()
    with pytest.raises(ValueError, match="has the labels 'gate'"):
        Rearrange("{m}.experts", "{m}.{p}_proj", "(p i) -> i", {"p": "gate"})


def test_objects_show_how_they_were_made(tmp_path: Path) -> None:
    path = str(tmp_path)
    assert repr(RingWriter(path)) == f"RingWriter({path!r})"
    assert repr(RingWriter(path, unchanged="link", workers=4)) == f"RingWriter({path!r}, unchanged='link', workers=4)"
    assert repr(Mine(path, overwrite=False)) == f"Mine({path!r}, overwrite=False)"
    assert repr(RingReader(path, trusted=True)) == f"RingReader({path!r}, trusted=True)"
    assert repr(RingHFWriter(path)).startswith(f"RingHFWriter({path!r}")
    assert repr(RingSavePlanner(writers=2)) == "RingSavePlanner(writers=2)"
    assert repr(RingLoadPlanner(share="off", missing="warn")) == "RingLoadPlanner(share='off', missing='warn')"
    assert repr(RingStager(buffers=2)) == "RingStager(buffers=2)"
    with Checkpointer(path, {"model": nn.Linear(2, 2)}, keep_last=3) as checkpointer:
        assert repr(checkpointer) == f"Checkpointer({path!r}, ['model'], keep_last=3)"
