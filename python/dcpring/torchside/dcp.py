"""Private names of ``torch.distributed.checkpoint``: items and chunks, names of nested keys, stored places."""

from __future__ import annotations

import contextlib
import copyreg
import io
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, LoadPlanner, SavePlanner, StorageReader, StorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem

from dcpring.torchside.frames import callers, local
from dcpring.torchside.versions import function, optional, release, required

_DCP = "torch.distributed.checkpoint"

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
else:
    StorageInfo = required(f"{_DCP}.filesystem", "_StorageInfo")
"""Where an item is stored; checkpoints of stock hold it, so its name and fields are part of the format."""

MEMORY_FORMATS = required(f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING")
"""How the pickle of TensorProperties names memory formats: an enumeration."""

OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"
"""The module of TensorProperties up to torch 2.2, where the enumeration is called MEM_FORMAT_ENCODING."""

drops_metadata_errors = release(torch.__version__) < (2, 13)
"""Whether a load without metadata says "metadata is None", and not why there is none."""

create_write_items: Callable[[str, Any], list[WriteItem]] = function(f"{_DCP}.planner_helpers", "_create_write_items")
"""What stock writes of a value on this rank: its name, the value."""

create_chunk_list: Callable[[Any], list[ChunkStorageMetadata]] = function(
    f"{_DCP}.planner_helpers", "_create_chunk_list"
)
"""What stock fills of a value on this rank."""

init_state_dict: Callable[[dict[str, Any]], Any] = function(f"{_DCP}.planner_helpers", "_init_state_dict")
"""Gives memory to the meta tensors of a state dict, in place."""

flatten_sharded_tensors: Callable[[dict[str, Any]], dict[str, Any]] = function(
    f"{_DCP}._sharded_tensor_utils", "_flatten_sharded_tensors"
)
"""Opens ShardedTensors of ShardedTensors."""

flatten_state_dict: Callable[[Any], tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]] = function(
    f"{_DCP}._nested_dict", "flatten_state_dict"
)
"""A nested state dict as one level, and the path that each name stands for."""

set_element: Callable[[Any, tuple[str | int, ...], Any], None] = function(f"{_DCP}._traverse", "set_element")
"""Sets what a path stands for in a nested state dict."""

_traverse_as_2_3 = optional(f"{_DCP}._traverse", "traverse_state_dict_v_2_3")


def names_as_2_3(state_dict: Any) -> set[str]:
    """The names that torch 2.3 would have given: it flattened in another way. Empty where this torch has forgotten."""
    names: set[str] = set()
    if _traverse_as_2_3 is not None:
        _traverse_as_2_3(state_dict, lambda path, _: names.add(".".join(map(str, path))))
    return names


# ---- TensorProperties, which has strides since torch 2.15 ----

HAS_STRIDES = "strides" in TensorProperties.__dataclass_fields__

_PARTS = 5
"""Of the pickled state of TensorProperties, as torch up to 2.14 has it; torch 2.15, with six, takes it too."""

_KNOWN_STATE = len(TensorProperties.__dataclass_fields__) <= _PARTS + 1

_RING_STRIDES = "ring_strides"
"""Where strides lie in a pickle: an attribute of TensorStorageMetadata, which all versions of torch pass over."""


def make_properties(
    dtype: torch.dtype,
    layout: torch.layout,
    requires_grad: bool,
    memory_format: torch.memory_format,
    pinned: bool,
    strides: tuple[int, ...] | None = None,
) -> TensorProperties:
    """TensorProperties, with strides where this torch has them."""
    more = {"strides": strides} if HAS_STRIDES else {}
    return TensorProperties(dtype, layout, requires_grad, memory_format, pinned, **more)


def properties_of(tensor: Tensor) -> TensorProperties:
    """As stock's ``create_from_tensor``, which raises for what has no strides (sparse tensors) since torch 2.15."""
    try:
        return TensorProperties.create_from_tensor(tensor)
    except (RuntimeError, NotImplementedError):
        pinned = tensor.is_pinned()
        return make_properties(tensor.dtype, tensor.layout, tensor.requires_grad, torch.contiguous_format, pinned)


def strides_of(properties: TensorProperties) -> tuple[int, ...] | None:
    """None where they are not known: stock takes the tensor for contiguous then."""
    return getattr(properties, "strides", None)


def contiguous_strides(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """As a contiguous tensor of these lengths has them."""
    strides, step = [], 1
    for length in reversed(lengths):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


class StoredProperties(TensorProperties):
    """What the name TensorProperties in a pickle stands for: takes the state that any version of torch has written."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(tuple(state) if HAS_STRIDES else tuple(state)[:_PARTS])
        self.__class__ = TensorProperties  # type: ignore[assignment]


def _readable_by_all(properties: TensorProperties) -> tuple[Any, ...]:
    return copyreg.__newobj__, (type(properties),), tuple(properties.__getstate__()[:_PARTS])  # type: ignore[attr-defined]


def _with_strides(entry: TensorStorageMetadata) -> tuple[Any, ...]:
    state, strides = dict(vars(entry)), strides_of(entry.properties)
    if strides is not None:
        is_contiguous = bool(entry.chunks) and strides == contiguous_strides(entry.chunks[0].sizes)
        state[_RING_STRIDES] = is_contiguous or tuple(strides)
    return copyreg.__newobj__, (type(entry),), state  # type: ignore[attr-defined]


_REDUCERS: dict[type, Any] = {TensorProperties: _readable_by_all, TensorStorageMetadata: _with_strides}


def pickled(value: Any, protocol: int | None = None, *, fast: bool = False) -> bytes:
    """A pickle of a Metadata, or of a part of one, that every supported torch reads, whichever it is made by.

    Args:
        fast: without a memo.
    """
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol)
    pickler.fast = fast
    if HAS_STRIDES and _KNOWN_STATE:
        pickler.dispatch_table = {**copyreg.dispatch_table, **_REDUCERS}
    pickler.dump(value)
    return out.getvalue()


def restore_strides(metadata: Metadata) -> None:
    """Puts strides that ``pickled`` or the core has set aside where this torch has them.

    Raises:
        ValueError: they are no strides.
    """
    if not HAS_STRIDES:
        return
    for entry in metadata.state_dict_metadata.values():
        strides: Any = vars(entry).pop(_RING_STRIDES, None)
        if strides is None:
            continue
        if strides is True:
            strides = contiguous_strides(entry.chunks[0].sizes)  # type: ignore[union-attr]
        if type(strides) is not tuple or not all(type(stride) is int for stride in strides):
            raise ValueError("its strides are no strides")
        known = entry.properties  # type: ignore[union-attr]
        entry.properties = make_properties(  # type: ignore[union-attr]
            known.dtype, known.layout, known.requires_grad, known.memory_format, known.pin_memory, strides
        )


def plans_for_itself(value: Any) -> bool:
    """Whether a value says by itself what is written of it; a tensor that does is not what it looks like."""
    return hasattr(value, "__create_write_items__")


def keep_plans_apart(planner: DefaultSavePlanner, key: str) -> None:
    """Stock keeps plans by the planner's class, so that two planners would get each other's: keeps them by ``key``."""
    planner._cached_plans_key = key


_background = optional(f"{_DCP}", "_async_process_executor")


def has_background_process() -> bool:
    """Whether ``async_save`` has started the process that all saves of AsyncCheckpointerType.PROCESS go to."""
    return getattr(_background, "_CHECKPOINT_PROCESS", None) is not None


def background_process_failure() -> str | None:
    """What that process has died of; "" if it is alive, None if there is none."""
    process = getattr(getattr(_background, "_CHECKPOINT_PROCESS", None), "_save_process", None)
    if process is None:
        return None
    code = process.exitcode
    if code is None:
        return ""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def forget_background_process() -> None:
    """The next save of AsyncCheckpointerType.PROCESS starts a new one. One that is alive is ended."""
    if _background is not None:
        _background._CHECKPOINT_PROCESS = None


def end_background_process() -> None:
    """Ends that process, if there is one, and returns when it has ended. The saves that are sent to it fail."""
    process = getattr(getattr(_background, "_CHECKPOINT_PROCESS", None), "_save_process", None)
    if process is not None:
        process.kill()
        process.join()


class AsyncSave(NamedTuple):
    """A call of torch's ``async_save``: what DCP does not tell the stager that it asks for a copy.

    Attributes:
        is_sent: the process in the background saves; else a thread does.
        group: whose ranks save together; None where this process saves alone.
    """

    is_sent: bool
    group: dist.ProcessGroup | None

    @property
    def members(self) -> list[int]:
        """The global ranks that save."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)


def calling_async_save() -> AsyncSave | None:
    """The ``async_save`` of torch's that is calling; None if none is."""
    for module, name, frame in callers():
        if (module, name) == (f"{_DCP}.state_dict_saver", "async_save"):
            is_sent = getattr(local(frame, "async_checkpointer_type"), "name", "") == "PROCESS"
            is_of_all = dist.is_available() and dist.is_initialized() and not local(frame, "no_dist")
            group = (local(frame, "process_group") or dist.group.WORLD) if is_of_all else None
            return AsyncSave(is_sent, group)
    return None


def future_of_thread() -> Future[Any] | None:
    """What DCP's thread, which is calling, will say of the save that it sends to the process in the background."""
    for module, name, frame in callers():
        if (module, name) == ("concurrent.futures.thread", "run"):
            future = getattr(local(frame, "self"), "future", None)
            if isinstance(future, Future):  # since Python 3.14 it is the second "run"
                return future
    return None


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """What a save or load of this process alone fails with is raised as it is, not within DCP's CheckpointException."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


_save = optional(f"{_DCP}.state_dict_saver", "_save_state_dict")
_load = optional(f"{_DCP}.state_dict_loader", "_load_state_dict")


def save(
    state_dict: dict[str, Any], writer: StorageWriter, planner: SavePlanner, group: dist.ProcessGroup | None
) -> Any:
    """What ``dcp.save`` does with a state dict of plain values, and returns; without a group, this process's alone.

    ``dcp.save`` itself warns of each save without a process group, as if that were not intended.
    """
    if _save is None:
        return dcp.save(state_dict, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    return _save(state_dict, writer, process_group=group, no_dist=group is None, planner=planner)


def load(
    state_dict: dict[str, Any], reader: StorageReader, planner: LoadPlanner, group: dist.ProcessGroup | None
) -> None:
    """What ``dcp.load`` does, likewise."""
    if _load is None:
        dcp.load(state_dict, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
    else:
        _load(state_dict, reader, process_group=group, no_dist=group is None, planner=planner)
