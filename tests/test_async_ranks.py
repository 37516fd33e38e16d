"""async_save on several ranks, of which one fails or goes before its save has begun."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _background import ending_process
from _distributed import run
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcpring import RingReader, RingStager, RingWriter

WAIT = 60.0
"""Seconds after which something that has to happen has not."""


def _save(state: dict[str, Any], path: str, stager: RingStager | None, **options: Any) -> Any:
    """The Future of a save, without a stager one that the writer copies for."""
    options.setdefault("storage_writer", RingWriter(path))
    saved: Any = dcp.async_save(state, async_stager=stager, **options)
    return saved if stager is None else saved.upload_completion


def _copies_on_some(path: str, has_stager: bool, kind: AsyncCheckpointerType) -> None:
    """The second rank has what cannot be copied; then what can."""
    rank, stager = dist.get_rank(), RingStager() if has_stager else None
    state: dict[str, Any] = {"model": {f"w{rank}": torch.ones(3)}, "value": threading.Lock() if rank else 2}
    with ending_process():
        saved = _save(state, path, stager, async_checkpointer_type=kind)
        with pytest.raises(CheckpointException, match="cannot copy 'value': TypeError") as caught:
            saved.result(WAIT)
        assert list(caught.value.failures) == [1]
        assert not Path(path, ".metadata").exists()
        dist.barrier()
        _save({**state, "value": 2}, path, stager, async_checkpointer_type=kind).result(WAIT)
    dist.barrier()
    loaded = {"value": 0}
    dcp.load(loaded, storage_reader=RingReader(path))
    assert loaded["value"] == 2
    if stager is not None:
        stager.close()


@pytest.mark.parametrize("has_stager", [True, False])
@pytest.mark.parametrize("kind", AsyncCheckpointerType)
def test_what_one_rank_cannot_copy_is_an_error_on_all(
    tmp_path: Path, has_stager: bool, kind: AsyncCheckpointerType
) -> None:
    """It was raised before DCP's collectives, in which the others waited for that rank."""
    run(2, _copies_on_some, str(tmp_path / "checkpoint"), has_stager, kind)
