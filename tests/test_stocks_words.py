"""Where stock raises, dcpring raises the same type, or one below it, with stock's words: programs look for both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import state_dict as stock_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions

from dcpring import RingLoadPlanner, RingReader, RingSavePlanner, RingWriter
from dcpring import state_dict as ring_state_dict


@dataclasses.dataclass
class Side:
    """The same names of stock and of dcpring."""

    writer: Any
    reader: Any
    save_planner: Any
    load_planner: Any
    state_dict: Any

    def save(self, state: dict[str, Any], path: Path, planner: Any = None, **options: Any) -> None:
        writer = self.writer(path, **options)
        dcp.save(state, storage_writer=writer, planner=planner or self.save_planner(), no_dist=True)

    def load(self, state: dict[str, Any], path: Path, planner: Any = None) -> None:
        reader = self.reader(path)
        dcp.load(state, storage_reader=reader, planner=planner or self.load_planner(), no_dist=True)


STOCK = Side(FileSystemWriter, FileSystemReader, dcp.DefaultSavePlanner, dcp.DefaultLoadPlanner, stock_state_dict)
RING = Side(RingWriter, RingReader, RingSavePlanner, RingLoadPlanner, ring_state_dict)
STORAGE = Side(RingWriter, RingReader, dcp.DefaultSavePlanner, dcp.DefaultLoadPlanner, ring_state_dict)
"""Our storage with stock's planners."""

STATE = {"a": torch.ones(2, 3), "n": 1}


def overwrite(side: Side, path: Path) -> None:
    side.save(STATE, path)
    side.save(STATE, path, overwrite=False)


def no_checkpoint(side: Side, path: Path) -> None:
    side.reader(path).read_metadata()


def missing_key(side: Side, path: Path) -> None:
    side.save(STATE, path)
    side.load(STATE | {"b": {"c": torch.ones(1)}}, path)


def missing_object(side: Side, path: Path) -> None:
    side.save(STATE, path)
    side.load(STATE | {"b": 1}, path)


def other_size(side: Side, path: Path) -> None:
    side.save(STATE, path)
    side.load({"a": torch.ones(3, 2), "n": 1}, path)


def object_for_a_tensor(side: Side, path: Path) -> None:
    side.save(STATE, path)
    side.load({"a": 1}, path)


def same_names(side: Side, path: Path) -> None:
    side.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, path)


def beyond_its_tensor(side: Side, path: Path) -> None:
    class Planner(side.save_planner):  # type: ignore[misc, name-defined]
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            items = list(plan.items)
            chunk = ChunkStorageMetadata(torch.Size([1, 0]), torch.Size([2, 3]))
            data = dataclasses.replace(items[0].tensor_data, chunk=chunk)
            index = dataclasses.replace(items[0].index, offset=chunk.offsets)
            item = dataclasses.replace(items[0], index=index, tensor_data=data)
            return dataclasses.replace(plan, items=[item, *items[1:]])

    side.save(STATE, path, Planner())


class _Wrong:
    """Hands out what was not planned."""

    given: Any = None

    def resolve_data(self, write_item: Any) -> Any:
        return self.given if write_item.index.fqn == "n" else super().resolve_data(write_item)  # type: ignore[misc]


def no_bytes(side: Side, path: Path) -> None:
    class Planner(_Wrong, side.save_planner):  # type: ignore[misc, name-defined]
        given = torch.ones(1)

    side.save(STATE, path, Planner())


def other_target(side: Side, path: Path) -> None:
    class Planner(side.load_planner):  # type: ignore[misc, name-defined]
        def resolve_tensor(self, read_item: Any) -> Any:
            return torch.ones(7)

    side.save(STATE, path)
    side.load({"a": torch.ones(2, 3)}, path, Planner())


def cut_off(side: Side, path: Path) -> None:
    side.save({"a": torch.ones(1000)}, path)
    (file,) = path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:1000])
    side.load({"a": torch.ones(1000)}, path)


CASES: list[tuple[Callable[[Side, Path], None], str]] = [
    (overwrite, ""),
    (no_checkpoint, "No such file or directory"),
    (missing_key, ""),
    (missing_object, ""),
    (other_size, ""),
    (object_for_a_tensor, ""),
    (same_names, ""),
    (beyond_its_tensor, "Failed to validate global plan"),
    (no_bytes, ""),
    (other_target, "mismatch sizes torch.Size([7]) vs torch.Size([2, 3])"),
    (cut_off, " "),
]
"""What is done, and the words to look for; "": all of stock's."""


def failure(case: Callable[[Any, Any], None], side: Side, path: Any) -> BaseException:
    with pytest.raises(BaseException) as caught:
        case(side, path)
    error = caught.value
    return error.failures[0][0] if isinstance(error, CheckpointException) else error


def compare(ours: BaseException, stocks: BaseException, words: str) -> None:
    assert isinstance(ours, type(stocks)), (type(ours), type(stocks), stocks)
    wanted = words or str(stocks).rstrip(".")
    assert wanted in str(stocks) and wanted in str(ours), (str(ours), str(stocks))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("side", (RING, STORAGE), ids=("planners", "storage"))
@pytest.mark.parametrize("case, words", CASES, ids=[case.__name__ for case, _ in CASES])
def test_checkpoints(tmp_path: Path, case: Callable[[Side, Path], None], words: str, side: Side) -> None:
    compare(failure(case, side, tmp_path / "ckpt"), failure(case, STOCK, tmp_path / "stock"), words)


# ---- state dicts of models and optimizers ----


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def trained(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def broadcast_of_parts(side: Side, _: Any) -> None:
    side.state_dict.get_model_state_dict(model(), options=StateDictOptions(broadcast_from_rank0=True))


def no_optimizers(side: Side, _: Any) -> None:
    side.state_dict.get_optimizer_state_dict(model(), ())


def empty_optimizer_state(side: Side, _: Any) -> None:
    net = model()
    side.state_dict.set_optimizer_state_dict(net, trained(net), {})


def lost_parameter(side: Side, _: Any) -> None:
    state = model().state_dict()
    del state["1.weight"]
    side.state_dict.set_model_state_dict(model(), state)


def strange_parameter(side: Side, _: Any) -> None:
    side.state_dict.set_model_state_dict(model(), model().state_dict() | {"2.weight": torch.ones(1)})


def lost_optimizer_state(side: Side, _: Any) -> None:
    net = model()
    optimizer = trained(net)
    state = side.state_dict.get_optimizer_state_dict(net, optimizer)
    del state["state"]["1.weight"]
    side.state_dict.set_optimizer_state_dict(net, optimizer, state)


def empty_group(side: Side, _: Any) -> None:
    net = model()
    state = side.state_dict.get_optimizer_state_dict(net, torch.optim.AdamW(net.parameters()))
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": []})
    side.state_dict.set_optimizer_state_dict(net, optimizer, state)


STATE_DICTS: list[tuple[Callable[[Side, Any], None], str]] = [
    (broadcast_of_parts, ""),
    (no_optimizers, ""),
    (empty_optimizer_state, ""),
    (lost_parameter, 'Missing key(s) in state_dict: "1.weight".'),
    (strange_parameter, 'Unexpected key(s) in state_dict: "2.weight".'),
    (lost_optimizer_state, "Missing optimizer state for parameter '1.weight' in checkpoint."),
    (empty_group, "There are param groups that have zero parameters."),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case, words", STATE_DICTS, ids=[case.__name__ for case, _ in STATE_DICTS])
def test_state_dicts(case: Callable[[Side, Any], None], words: str) -> None:
    ours, stocks = failure(case, RING, None), failure(case, STOCK, None)
    if isinstance(stocks, KeyError):  # up to torch 2.9, of what is not there
        assert case is lost_optimizer_state and words in str(ours)
    else:
        compare(ours, stocks, words)
