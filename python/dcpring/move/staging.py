"""A copy of a state dict in memory that is kept from save to save.

The memory is an Arena, which belongs to its StagingBuffer. What ``stage`` returns lives in it until the next ``stage``.
A copy is made in two steps. ``open`` runs in the thread that owns the state: it walks through the tree, and copies what
is no tensor. ``fill`` may run in any thread: it copies the tensors, those in host memory by threads of the core.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from itertools import chain, compress
from operator import attrgetter, setitem
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from dcpring import _C
from dcpring.base.joint import failure_of
from dcpring.base.masks import zeros
from dcpring.base.memory import FREED, is_dense, is_freed, is_lazy_view, lazy_views, same_memory
from dcpring.base.order import Turn
from dcpring.base.samples import sample_view
from dcpring.base.text import some_keys
from dcpring.base.untold import without_frames
from dcpring.errors import CheckpointError, naming
from dcpring.move.arena import Arena
from dcpring.move.device import (
    DEFAULT_PIECE_BYTES,
    Room,
    copy_to_host,
    is_small,
    on_accelerator,
    parts_of,
    side_by_side,
)
from dcpring.move.frozen import Sign, equal_samples, note_copies, signs_of, take_copied
from dcpring.move.sending import Staged
from dcpring.names.diff import check_state_dict
from dcpring.plan.flatten import is_terminal
from dcpring.torchside import accelerators
from dcpring.torchside.accelerators import is_accelerator
from dcpring.torchside.composed import Composed
from dcpring.torchside.tensors import (
    PLAIN_TYPES,
    ShardedTensor,
    frozen_parameter,
    is_frozen,
    local_tensor,
    versions_of,
    with_local,
    with_shards,
)

_PART_BYTES = 8 << 20
"""Tensors that are no stretch of memory are copied by as much, for each of which torch takes some on the device."""

_ATOMS = (type(None), bool, int, float, complex, str, bytes)

_needs_gradient = attrgetter("requires_grad")
_attributes = attrgetter("__dict__")
_device = attrgetter("device")
_is_cpu = attrgetter("is_cpu")

_WORKERS = 2
"""Threads that copy, unless told otherwise: two have most of what memory gives, and leave processors to training."""


class StagingBuffer:
    """Copies states so that training may go on while they are written.

    What is saved of the copy is what would have been saved of the state: the same names, values and properties, and
    tensors that are tied are copied once and stay tied. Of the properties ``pin_memory`` tells of the copy, and so do
    the ``strides`` that torch 2.15 adds, where a tensor has gaps in memory or is a conjugate or negative view.

    Args:
        workers: threads that copy what lies in host memory.
        is_shared: the copy goes to memory that other processes can map.
    """

    def __init__(self, workers: int | None = None, is_shared: bool = False) -> None:
        self._workers = workers or min(_WORKERS, os.cpu_count() or 1)
        self._is_shared = is_shared
        self._arena = Arena(is_shared)
        self._rooms: dict[torch.device, Room] = {}

    @property
    def allocations(self) -> int:
        """How often memory was taken."""
        return self._arena.allocations

    @property
    def size_bytes(self) -> int:
        """What is held now."""
        return self._arena.size_bytes

    def stage(self, state: Any, frozen: Collection[Tensor] | None = None) -> Any:
        """The same tree with every tensor copied to the host, and everything else copied deeply; mappings are dicts.

        It waits twice for each accelerator on which the state has tensors: before it copies, for all that any thread
        has given to any of its streams, so that what training still writes is there; and afterwards, so that training
        may write again. Accelerators without a tensor of the state are not waited for.

        Args:
            state: a state dict.
            frozen: tensors of the state that nobody writes to, besides parameters that require no gradient. Those that
                the buffer has, and that seem not to have changed, are not copied again. None: all is copied.
        """
        return self.fill(self.open(state, Devices(), frozen))

    def open(self, state: Any, devices: Devices, frozen: Collection[Tensor] | None = None) -> Opened:
        """The first step: what is no tensor is copied when this returns."""
        opened = Opened(state, devices, frozen)
        tensors = opened.tensors()
        devices.ready(set() if all(map(_is_cpu, tensors)) else set(map(_device, tensors)))
        return opened

    def fill(self, opened: Opened) -> Any:
        """The second step: copies the tensors, and gives the tree.

        Raises:
            CheckpointError: what was copied has been written to meanwhile, as far as autograd counts that.
        """
        with opened.devices.entered():
            try:
                with torch.inference_mode(False), torch.no_grad():
                    signs, hosts = self._fill(opened)
            finally:
                opened.devices.wait()  # after an error too: the memory will be used again
        opened.check_unchanged()
        note_copies(signs, hosts)
        return Staged(opened.tree) if self._is_shared and type(opened.tree) is dict else opened.tree

    def release(self, is_free: bool = False) -> None:
        """Gives the memory back to the system, the pinned memory that torch would keep included.

        Args:
            is_free: nobody reads the last copy any more, whoever refers to it.
        """
        self._rooms.clear()
        self._arena.release(is_free)

    def _fill(self, opened: Opened) -> tuple[dict[int, Sign], list[Tensor]]:
        """Copies. Gives the signs of what may stay as it is, and the copies, by number."""
        sources, signs = opened.sources(), opened.signs
        handles = _C.Tensors(sources)
        chosen, same = _in_memory(sources, handles)
        distinct = [n for n in chosen if n not in same] if same else list(chosen)
        tensors = sources
        if len(distinct) < len(sources):
            tensors = [sources[n] for n in distinct]
            handles = _C.Tensors(tensors)
            signs = _of_distinct(signs, distinct, same)
        hosts, places = self._arena.tensors_for(tensors, handles)
        unchanged = self._unchanged(signs, tensors, hosts, opened.devices)
        mask = _plain_bytes(tensors, handles)
        others = [n for n in compress(range(len(mask)), zeros(mask)) if n not in unchanged]
        self._copy_others(tensors, hosts, others, opened)
        if unchanged:
            mask = bytes(is_plain and n not in unchanged for n, is_plain in enumerate(mask))
        _C.copy_tensors(handles, places, mask, self._workers)
        self._put(opened, sources, distinct, same, hosts)
        return signs, hosts

    @staticmethod
    def _put(
        opened: Opened, sources: list[Tensor], distinct: list[int], same: dict[int, int], hosts: list[Tensor]
    ) -> None:
        if len(distinct) == len(sources):
            opened.put(hosts)
            return
        made: list[Tensor | None] = [None] * len(sources)
        for n, host in zip(distinct, hosts, strict=True):
            made[n] = host
        for n, first in same.items():
            made[n] = made[first].detach()  # type: ignore[union-attr]
        opened.put(
            [opened.own_copy(source) if host is None else host for source, host in zip(sources, made, strict=True)]
        )

    def _unchanged(
        self, signs: dict[int, Sign], tensors: list[Tensor], hosts: list[Tensor], devices: Devices
    ) -> set[int]:
        """Which tensors need not be copied. Until all others are, nothing is known of what the buffer has."""
        by_device: dict[torch.device, list[int]] = defaultdict(list)
        for n in take_copied(signs, hosts):
            by_device[tensors[n].device].append(n)
        unchanged: set[int] = set()
        for device, numbers in by_device.items():
            chosen, copies = [tensors[n] for n in numbers], [hosts[n] for n in numbers]
            if is_accelerator(device):
                devices.meet(device)
                with devices.on(device):
                    chosen = list(torch.stack(list(map(sample_view, chosen))).cpu())
                copies = list(map(sample_view, copies))
            unchanged.update(compress(numbers, equal_samples(chosen, copies)))
        return unchanged

    def _copy_others(self, tensors: list[Tensor], hosts: list[Tensor], others: list[int], opened: Opened) -> None:
        """What the core cannot copy: tensors of accelerators, and such whose bytes are not their values."""
        for device in {tensors[n].device for n in others}:
            opened.devices.meet(device)
        together = self._copy_together(tensors, hosts, others, opened)
        for n in others:
            if n not in together:
                with opened.naming(tensors[n]), opened.devices.on(tensors[n].device):
                    copy_one(tensors[n], hosts[n])

    def _copy_together(self, tensors: list[Tensor], hosts: list[Tensor], others: list[int], opened: Opened) -> set[int]:
        """Copies small tensors of accelerators whose copies lie side by side; which they are."""
        small: dict[torch.device, dict[int, Tensor]] = {}
        for n in others:
            if on_accelerator(tensors[n]) and is_small(tensors[n]) and tensors[n].numel():
                small.setdefault(tensors[n].device, {})[n] = hosts[n]
        done: set[int] = set()
        for device, chosen in small.items():
            for run in side_by_side(chosen, DEFAULT_PIECE_BYTES):
                if len(run) < 2 or (room := self._room(device, opened.devices)) is None:
                    continue
                with opened.naming(tensors[run[0]], len(run) - 1), opened.devices.on(device):
                    room.to_host([tensors[n] for n in run], [hosts[n] for n in run])
                done.update(run)
        return done

    def _room(self, device: torch.device, devices: Devices) -> Room | None:
        """Memory of the device that is kept: what has used it is done when ``fill`` returns, on whatever stream."""
        if device not in self._rooms:
            with devices.on(device):  # behind whatever it was used for there before
                room = Room.on(device, DEFAULT_PIECE_BYTES)
            if room is not None:
                self._rooms[device] = room
        return self._rooms.get(device)


class Copying:
    """The copy of one state in a buffer, from when the state is opened until the copy is complete.

    Attributes:
        copied: done when nobody reads the state any more; it has the error if there is no copy.
        turn: of the save that the copy is for, where there is one.
    """

    def __init__(self, buffer: StagingBuffer, opened: Opened | None) -> None:
        self._buffer, self._opened = buffer, opened
        self.copied: Future[None] = Future()
        self.turn: Turn | None = None

    @classmethod
    def of(cls, buffer: StagingBuffer, state: Any, devices: Devices, frozen: Collection[Tensor] | None) -> Copying:
        """One whose error, if the state cannot be opened, is told by ``fill``."""
        try:
            return cls(buffer, buffer.open(state, devices, frozen))
        except Exception as error:
            failed = cls(buffer, None)
            failed.copied.set_exception(without_frames(error))
            return failed

    def fill(self) -> Any:
        """The copy, made in the calling thread, once. Where it fails, what says so on all ranks when it is planned."""
        opened, self._opened = self._opened, None
        try:
            tree = None if opened is None else self._buffer.fill(opened)
        except Exception as error:
            self.copied.set_exception(without_frames(error))
        finally:  # Ctrl-C ends a copy that the calling thread makes
            del opened
            self.give_up()
        failure = self.copied.exception()
        return tree if failure is None else uncopied(failure)

    def give_up(self) -> None:
        """Nobody will make the copy."""
        self._opened = None
        if not self.copied.done():
            self.copied.set_result(None)


def uncopied(error: BaseException) -> dict[str, Any]:
    """What is saved in the place of a state that could not be copied on this rank: all ranks get its error.

    An error before DCP's collectives would leave the others in them, waiting for this rank.
    """
    text = str(error) if isinstance(error, CheckpointError) else f"cannot copy the state: {failure_of(error).text}"
    return {"state": _Uncopied(text)}


class _Uncopied:
    """Raises when it is planned, which DCP does in a collective."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __create_write_items__(self, *_: object) -> None:
        raise CheckpointError(self._text)


class Devices:
    """The accelerators of one state: what is waited for before and after a copy. This waits for all their streams.

    Attributes:
        is_beside: the copy is made beside the thread that owns the state.
    """

    is_beside = False

    def __init__(self) -> None:
        self._met: set[torch.device] = set()

    def meet(self, device: torch.device) -> None:
        """Called before something is copied from a device."""
        if is_accelerator(device) and device not in self._met:
            self._met.add(device)
            accelerators.active.synchronize(device)

    def ready(self, devices: set[torch.device]) -> None:
        """Called in the thread that owns the state, with all devices on which it has tensors to be copied."""

    def entered(self) -> AbstractContextManager[Any]:
        """In the thread that copies, around all that it does."""
        return contextlib.nullcontext()

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """Where copies from a device go."""
        return contextlib.nullcontext()

    def wait(self) -> None:
        """Until all copies are done."""
        for device in self._met:
            accelerators.active.synchronize(device)


class SideStreams(Devices):
    """Copies go on another stream, behind what the owner's thread has given to its current ones.

    The thread that copies has current streams, and a current device, of its own, which are not to be used.
    """

    is_beside = True

    def __init__(self) -> None:
        super().__init__()
        self._events: dict[torch.device, torch.Event] = {}
        self._streams: dict[torch.device, torch.Stream] = {}

    def meet(self, device: torch.device) -> None:
        if is_accelerator(device):
            self._met.add(device)

    def ready(self, devices: set[torch.device]) -> None:
        for device in {*self._met, *filter(is_accelerator, devices)}:
            self._events[device] = accelerators.active.event(device)
            self._events[device].record(accelerators.active.current_stream(device))

    def entered(self) -> AbstractContextManager[Any]:
        first = next(iter(self._events), None)
        return contextlib.nullcontext() if first is None else accelerators.active.on_device(first)

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        if device not in self._events:
            return contextlib.nullcontext()
        if device not in self._streams:
            self._streams[device] = accelerators.active.copy_stream(device)
            self._streams[device].wait_event(self._events[device])
        return self._streams[device]

    def wait(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
        for event in self._events.values():
            event.synchronize()


def _of_distinct(signs: dict[int, Sign], distinct: list[int], same: dict[int, int]) -> dict[int, Sign]:
    """The signs by the number among the distinct ones. Of those that are tied all have to have one."""
    trained = {first for n, first in same.items() if n not in signs}
    return {at: signs[n] for at, n in enumerate(distinct) if n in signs and n not in trained}


def _plain_bytes(tensors: list[Tensor], handles: _C.Tensors) -> bytes:
    """A mark for each tensor: 1 where the bytes in host memory are its values."""
    marks = bytearray(zeros(handles.kinds()))
    for position in lazy_views(tensors):
        marks[position] = False
    return bytes(marks)


def _in_memory(sources: list[Tensor], handles: _C.Tensors) -> tuple[Sequence[int], dict[int, int]]:
    """Which tensors are plain memory, and of those that are the same memory as an earlier one, which."""
    kinds = handles.kinds()
    elsewhere = list(compress(range(len(kinds)), kinds))
    strange = {n for n in elsewhere if not _is_plain(sources[n])}
    candidates = sorted({*handles.shared(), *elsewhere} - strange)
    same = same_memory({n: sources[n] for n in candidates})
    every = range(len(sources))
    return [n for n in every if n not in strange] if strange else every, same


def _is_plain(value: Tensor) -> bool:
    """Whether it is plain memory; sparse, quantized and nested tensors know themselves how they are copied."""
    return (
        value.layout == torch.strided
        and not (value.is_quantized or value.is_meta or value.is_nested)
        and bool(value.data_ptr() or not value.numel())
        and not is_freed(value)
    )


def own_copy(tensor: Tensor) -> Tensor:
    """As the tensor's class copies itself to the host."""
    if tensor.is_meta:
        return tensor
    if is_freed(tensor):
        raise ValueError(FREED)
    return tensor.detach().cpu() if on_accelerator(tensor) else tensor.detach().clone()


def copy_one(tensor: Tensor, host: Tensor) -> None:
    """Copies the tensor's values; on an accelerator that is under way when this returns."""
    if not is_lazy_view(tensor) and is_dense(tensor):
        host.copy_(tensor, non_blocking=True)
        return
    limit = _PART_BYTES if on_accelerator(tensor) else max(tensor.nbytes, 1)
    strides = host.stride()
    order = sorted(range(host.dim()), key=lambda d: -strides[d])  # of memory
    flat, start = host.permute(order).view(-1), 0
    for part in parts_of(tensor.permute(order), limit):
        copy_to_host([part], [flat[start : start + part.numel()].view(part.shape)])
        start += part.numel()


# ---- the tree ----


class Opened:
    """A state as the planner opens it: mappings, and lists that hold tensors or mappings.

    Attributes:
        tree: dicts and lists of its own, copies of objects; and in the place of each tensor, until ``put``, the tensor.
        devices: on which it lies.
        signs: of sources that are not trained, by number; none where all is to be copied.
    """

    def __init__(self, state: Any, devices: Devices, frozen: Collection[Tensor] | None = None) -> None:
        self.devices = devices
        self._root = [state]
        self._deep = _DeepCopies(devices)
        self._plain: tuple[list[Any], list[Any], list[Tensor]] = ([], [], [])
        self._others: list[tuple[Any, Any, Tensor]] = []
        self._inner: dict[int, Tensor] = {}
        self._wholes: dict[int, Tensor] = {}
        self._copies: list[Tensor] = []
        try:
            self._root[0] = self._value(state, self._root, 0)
        except RecursionError:
            check_state_dict(state)
            raise
        plain = ((tensor, tensor) for tensor in self._plain[2])
        inner = ((tensor, self._wholes[key]) for key, tensor in self._inner.items())
        self.signs = {} if frozen is None else signs_of(chain(plain, inner), frozen)
        self._versions = versions_of(self.tensors()) if devices.is_beside else []

    @property
    def tree(self) -> Any:
        return self._root[0]

    def sources(self) -> list[Tensor]:
        """What may lie in plain memory of this rank: tensors, local parts of DTensors and of ShardedTensors."""
        return [*self._plain[2], *self._inner.values()]

    def tensors(self) -> list[Tensor]:
        """The sources, and all that is more than a plain tensor, as a whole."""
        return [*self.sources(), *(tensor for _, _, tensor in self._others)]

    def check_unchanged(self) -> None:
        """Raises CheckpointError if the copies are not what the state was when it was opened, and is still.

        A forward pass under DistributedDataParallel writes to buffers what they have: only other bytes count.
        """
        copies, self._copies = self._copies, []
        if not self._versions or self._versions == versions_of(self.tensors()):
            return
        for device in {tensor.device for tensor in self.tensors() if on_accelerator(tensor)}:
            accelerators.active.synchronize(device)
        pairs = zip(self._versions, versions_of(self.tensors()), self.tensors(), strict=True)
        written = {id(tensor): tensor for before, now, tensor in pairs if before != now}
        changed = dict.fromkeys(self._names_of_changed(written, copies))
        if changed:
            raise CheckpointError(
                f"{some_keys(list(changed))} changed while the state was copied, so that the copy is torn; call "
                "synchronize(), of RingStager or Checkpointer, before what writes to the state: the optimizer's step, "
                "and a forward pass that updates buffers, as BatchNorm's does"
            )

    def _names_of_changed(self, written: Mapping[int, Tensor], copies: list[Tensor]) -> Iterator[str]:
        by_source = {id(source): copied for source, copied in zip(self.sources(), copies, strict=True)}
        places = [*zip(*self._plain, strict=True), *self._others]
        for parent, key, whole in places:
            parts = [part for part, _ in _parts_of(whole)]
            if not any(id(tensor) in written for tensor in (whole, *parts)):
                continue
            known = [(part, by_source[id(part)]) for part in parts if id(part) in by_source]
            if len(known) < max(len(parts), 1) or not all(_have_same_bits(*pair) for pair in known):
                yield _name_of(parent[key], self.tree).strip("'")

    def put(self, copies: list[Tensor]) -> None:
        """Puts copies in the place of the sources."""
        self._copies = copies
        parents, keys, sources = self._plain
        deque(map(setitem, parents, keys, _all_like(copies[: len(sources)], sources)), maxlen=0)
        inner = dict(zip(self._inner, copies[len(sources) :], strict=True))
        for parent, key, value in self._others:
            parent[key] = self._rebuilt(value, inner)

    def _value(self, value: Any, parent: Any, key: Any) -> Any:
        if isinstance(value, Tensor):
            self._tensor(value, parent, key)
            return value
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, list) and not is_terminal(value):
            made = list(value)
            for index, part in enumerate(value):
                made[index] = self._value(part, made, index)
            return made
        if type(value) in _ATOMS:
            return value
        with self.naming(value):
            return self._deep.copy(value)

    def _mapping(self, mapping: Mapping[Any, Any]) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        parents, keys, tensors = self._plain
        for key, value in mapping.items():
            if type(value) in PLAIN_TYPES:
                parents.append(made)
                keys.append(key)
                tensors.append(value)
                made[key] = value
            else:
                made[key] = self._value(value, made, key)
        return made

    def _tensor(self, tensor: Tensor, parent: Any, key: Any) -> None:
        if type(tensor) in PLAIN_TYPES:
            for column, entry in zip(self._plain, (parent, key, tensor), strict=True):
                column.append(entry)
        else:
            self._others.append((parent, key, tensor))
            self._note_inner(tensor)

    def _note_inner(self, tensor: Tensor) -> None:
        for part, whole in _parts_of(tensor):
            self._inner[id(part)], self._wholes[id(part)] = part, whole

    def _rebuilt(self, tensor: Tensor, inner: dict[int, Tensor]) -> Tensor:
        if isinstance(tensor, DTensor):
            made = with_local(tensor, self._rebuilt(local_tensor(tensor), inner))
            return frozen_parameter(made) if is_frozen(tensor) else made
        if isinstance(tensor, ShardedTensor):
            return with_shards(tensor, [self._rebuilt(shard.tensor, inner) for shard in tensor.local_shards()])
        if isinstance(tensor, Composed):
            return tensor.with_tensors(self._rebuilt(part.tensor, inner) for part in tensor.held)
        copied = inner.get(id(tensor))
        return tensor if tensor.is_meta else _like(self.own_copy(tensor) if copied is None else copied, tensor)

    def own_copy(self, tensor: Tensor) -> Tensor:
        """As the class of one of the tensors in the tree copies itself."""
        self.devices.meet(tensor.device)
        with self.naming(tensor), self.devices.on(tensor.device):
            return own_copy(tensor)

    def naming(self, value: Any, others: int = 0) -> AbstractContextManager[None]:
        """Where a value of the tree, or what is inside of one, is copied, with so many others."""
        whole = self._wholes.get(id(value), value)
        besides = f", or one of {others} small tensors that go with it" if others else ""
        return naming(lambda: f"cannot copy {_name_of(whole, self.tree)}{besides}")


def _parts_of(tensor: Tensor, whole: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """The plain tensors that one is, or is made of, each with the DTensor that it is of, or itself; none of a class
    that is not known."""
    if isinstance(tensor, DTensor):
        yield from _parts_of(local_tensor(tensor), tensor)
    elif isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            yield from _parts_of(shard.tensor)
    elif isinstance(tensor, Composed):
        for part in tensor.held:
            yield from _parts_of(part.tensor)
    elif type(tensor) in PLAIN_TYPES:
        yield tensor, tensor if whole is None else whole


def _have_same_bits(tensor: Tensor, copied: Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return False
    one, other = (
        each.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)
        for each in (tensor, copied)
    )
    return torch.equal(one, other)


def _name_of(value: Any, tree: Any) -> str:
    """Where a value lies in a tree, for a message."""
    seen: set[int] = set()
    stack: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
    while stack:
        path, part = stack.pop()
        if part is value:
            return repr(".".join(map(str, path)))
        if isinstance(part, (Mapping, list)) and id(part) not in seen:
            seen.add(id(part))
            items = part.items() if isinstance(part, Mapping) else enumerate(part)
            stack.extend(((*path, key), inner) for key, inner in items)
    return f"a {type(value).__qualname__}"


def _all_like(copies: list[Tensor], sources: list[Tensor]) -> list[Tensor]:
    """``_like`` of all, quickly where there is nothing to do."""
    flags, has = list(map(_needs_gradient, sources)), list(map(_needs_gradient, copies))
    is_same = flags == has and (all(flags) or Parameter not in set(map(type, sources)))
    if is_same and not any(map(_attributes, sources)) and not any(map(_attributes, copies)):
        return copies
    return [made if made is tensor else _like(made, tensor) for made, tensor in zip(copies, sources, strict=True)]


def _like(made: Tensor, tensor: Tensor) -> Tensor:
    """What is looked at beside the values: whether there is a gradient, whether it is a parameter without one, and the
    attributes that say what a plain tensor is a part of (DCP's CheckpointableTensor)."""
    if type(tensor) is Parameter and not tensor.requires_grad:
        made = frozen_parameter(made)
    elif made.requires_grad != tensor.requires_grad:
        made = made.detach() if made.requires_grad else made
        made.requires_grad_(tensor.requires_grad)
    if tensor.__dict__:  # what a class's copy has of its own it keeps
        made = made.detach().requires_grad_(made.requires_grad) if type(made) is Tensor else made
        made.__dict__.update({**tensor.__dict__, **made.__dict__})
    return made


class _DeepCopies(TorchFunctionMode):
    """Deep copies of objects, which may hold tensors anywhere, on any device."""

    def __init__(self, devices: Devices) -> None:
        super().__init__()
        self._devices = devices
        self._memo: dict[int, Any] = {}

    def copy(self, value: Any) -> Any:
        with self:
            return copy.deepcopy(value, self._memo)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in args:
            if isinstance(tensor, Tensor):
                self._devices.meet(tensor.device)
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:  # which torch refuses, but would pickle
            tensor, memo = args
            memo[id(tensor)] = func(tensor.detach(), memo).requires_grad_()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))
