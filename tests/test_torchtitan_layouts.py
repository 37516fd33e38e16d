"""``integrations.torchtitan`` works with torchtitan's modules where they lay before August 2026, and lie since.

torchtitan is none of the tests' dependencies: modules with the names that are imported stand for it. Its own trainer is
in ``trainers/test_torchtitan.py``.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import Dataset

import dcpring.integrations

LOADER = {"0.3.0": "components.dataloader", "August 2026": "components.data.loader"}


class AsyncMode(StrEnum):
    DISABLED = "disabled"
    ASYNC = "async"
    ASYNC_WITH_PINNED_MEM = "async_with_pinned_mem"


class CheckpointManager:
    def __init__(self) -> None:
        self.pg = self.stager = None
        self.states: dict[str, Any] = {}

    @dataclass(kw_only=True, slots=True)
    class Config:
        interval: int = 500


class BaseDataLoader:
    @dataclass(kw_only=True, slots=True)
    class Config:
        pass


@pytest.fixture(params=LOADER)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def titan(layout: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The integration, with modules of torchtitan as a version has them."""
    there: dict[str, dict[str, Any]] = {
        "": {},
        "components": {},
        "components.checkpointer": {},
        "components.checkpointer.dcp": {
            "MODEL": "model",
            "AsyncMode": AsyncMode,
            "CheckpointManager": CheckpointManager,
        },
        "components.data": {},
        LOADER[layout]: {"BaseDataLoader": BaseDataLoader},
        "tools": {"filesystem": SimpleNamespace(is_remote=lambda path: "://" in path)},
        "tools.utils": {"GarbageCollection": SimpleNamespace(collect=lambda reason: None)},
    }
    for name in ("components.checkpoint", *LOADER.values()):
        monkeypatch.setitem(sys.modules, f"torchtitan.{name}", None)
    for name, holds in there.items():
        module = ModuleType(f"torchtitan.{name}".rstrip("."))
        module.__path__ = []
        vars(module).update(holds)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    file = Path(dcpring.integrations.__file__).with_name("torchtitan.py")
    spec = importlib.util.spec_from_file_location("integration_of_a_layout", file)
    assert spec is not None and spec.loader is not None
    integration = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, integration)
    spec.loader.exec_module(integration)
    return integration


@pytest.mark.parametrize("mode", [AsyncMode.DISABLED, AsyncMode.ASYNC])
def test_calls_of_dcp_name_the_folder(titan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    """Programs that look at them, as torchtitan's own tests, find it beside the writer."""
    called = []
    for name in ("save", "async_save", "load"):
        stock = getattr(dcp, name)
        monkeypatch.setattr(dcp, name, lambda *args, _stock=stock, **kw: (called.append(kw), _stock(*args, **kw))[1])
    manager, folder = titan.RingCheckpointManager(), str(tmp_path / "step-2")
    saved = manager.dcp_save({"step": 2, "weight": torch.arange(4.0)}, folder, mode, enable_garbage_collection=True)
    if mode == AsyncMode.ASYNC:
        saved.result()
    state = {"step": 0, "weight": torch.zeros(4)}
    manager.dcp_load(state, folder, from_hf=False, from_quantized=False)
    assert state["step"] == 2 and state["weight"].tolist() == [0, 1, 2, 3]
    assert [call["checkpoint_id"] for call in called[:1] + called[-1:]] == [folder, folder]
    assert isinstance(called[0]["storage_writer"], dcpring.RingWriter)


def test_batches_have_the_form_that_a_version_takes(titan: Any, layout: str) -> None:
    class Numbers(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return {"input": torch.full((3,), index)}, torch.full((3,), index + 1)

    class Loader(titan.ElasticDataLoader):  # type: ignore[misc]
        def samples(self, config: Any, *, seq_len: int, **_: Any) -> Numbers:
            assert seq_len == 3
            return Numbers()

    config = titan.ElasticDataLoader.Config(shuffle=False, infinite=False)
    place = {"dp_world_size": 2, "dp_rank": 1, "tokenizer": None}
    if layout == "0.3.0":
        batches = list(Loader(config, **place, local_batch_size=2, seq_len=3))
        assert [inputs["input"].shape for inputs, _ in batches] == [(2, 3)] * 2
    else:
        batches = list(Loader(config, **place, num_tokens_per_batch=6, max_context_length=3))
        assert [inputs["input"].shape for inputs, _ in batches] == [(6,)] * 2
        with pytest.raises(ValueError, match="7 tokens is no number of samples of 3"):
            Loader(config, **place, num_tokens_per_batch=7, max_context_length=3)
    assert torch.equal(batches[0][0]["input"] + 1, batches[0][1])
    assert sorted({int(one) for inputs, _ in batches for one in inputs["input"].flatten()}) == [1, 3, 5, 7]
