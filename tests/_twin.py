"""A simulated accelerator, whose tensors are real ones of torch's device "privateuseone" and whose work is late.

The memory of its tensors is the host's. Every copy goes into the queue of a stream, as on a GPU, and is done when
somebody waits for it, or earlier, or after other streams' work: whatever the rules of streams and events allow, by the
twin's order. So code that waits for too little gets other bytes, here and not one time in a thousand on a GPU:

- What was copied to the host and not waited for is not there.
- A pinned buffer that is refilled before its copy to the device was waited for arrives with what it was refilled with.
- Device memory that is freed while another stream still uses it is overwritten.
- A conjugate view that is copied to the host without waiting loses its conjugation, as in torch's CUDA copy.

Copies make the same temporaries on the device as torch's for CUDA, and what is allocated there is counted. Operations
other than copies wait for all of the device and then work on the CPU. ``twin()`` is a fixture's business: one is active
at a time, tensors of another are dead. Each thread has a current device, 0 until it sets another, and current streams,
which are the default ones until it enters another. A context is made on each device that a thread has made current as
CUDA does: by entering a stream of it, by leaving one of another device, and where memory is pinned.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from dcpring.torchside import accelerators

if not hasattr(torch._C, "_acc"):
    pytest.skip("devices are made in Python since torch 2.10", allow_module_level=True)

TYPE = "privateuseone"
ORDERS = ("needed only", "others first", "at once", 0, 1)
Order = Literal["needed only", "others first", "at once"] | int
"""When work is done: only what somebody waits for; all that does not depend on it before; when it is submitted; or
anything between, by a seed."""

FREED = 0xEE


class Stream:
    """A queue of work on one device. Work is a function, or an event to be waited for."""

    def __init__(self, twin: Twin, device: int) -> None:
        self._twin = twin
        self.device = device
        self.work: list[Callable[[], Any] | Event] = []
        self.done = 0

    def submit(self, action: Callable[[], Any]) -> None:
        with self._twin.lock:
            self._twin.crossings += isinstance(action, Copy)
            self.work.append(action)
            self._twin.submitted(self)

    def wait_event(self, event: Event) -> None:
        self.work.append(event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._twin.wait_for(self, len(self.work))

    @property
    def under_way(self) -> int:
        """Work that is not done, other than that of the allocator."""
        return sum(not isinstance(work, (Event, _Freed)) for work in self.work[self.done :])

    def run(self, until: int) -> None:
        while self.done < until:
            work = self.work[self.done]
            if isinstance(work, Event):
                work.run()
            else:
                self.work[self.done] = Event()  # whatever it held is let go of
                work()
            self.done += 1

    def __enter__(self) -> Stream:
        thread = self._twin.thread
        thread.outer.append((thread.device, thread.streams[self.device]))
        thread.streams[self.device] = self
        self._twin.set_device(self.device)
        return self

    def __exit__(self, *_: object) -> None:
        device, self._twin.thread.streams[self.device] = self._twin.thread.outer.pop()
        self._twin.set_device(device)


class Event:
    """A place in a stream."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.place = 0

    def record(self, stream: Stream) -> None:
        self.stream, self.place = stream, len(stream.work)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream._twin.wait_for(self.stream, self.place)

    def run(self) -> None:
        if self.stream is not None:
            self.stream.run(self.place)


class Copy:
    """A copy between a device and the host."""

    def __init__(self, into: Tensor, values: Tensor) -> None:
        self._into, self._values = into, values
        self.size = values.nbytes

    def __call__(self) -> None:
        self._into.copy_(self._values)


class _Freed:
    """What becomes of memory that is freed: its next owner works on the same stream."""

    def __init__(self, memory: Any, size: int) -> None:
        self._memory, self._size = memory, size

    def __call__(self) -> None:
        ctypes.memset(self._memory, FREED, self._size)


class _Thread(threading.local):
    """What a thread of the host's works on."""

    def __init__(self, defaults: list[Stream]) -> None:
        self.device = 0
        self.streams = defaults[:]
        self.outer: list[tuple[int, Stream]] = []


class Twin(accelerators.Accelerators):
    """The accelerator: its devices, and their streams.

    Attributes:
        thread: the current device of the thread that asks, and its current stream of each device.
        contexts: devices that have one.
        pinned_stretches: how much memory was pinned at a time.
        allocated, most_allocated: bytes of tensors on each device, now and at most.
        pinned_bytes, most_pinned: bytes of pinned memory that torch would hold, in use or kept, now and at most.
        waits: how often the host has waited.
        crossings: how many copies between devices and host have been submitted.
        pins: whether memory that is there can be pinned.
    """

    def __init__(self, order: Order = "needed only", devices: int = 2) -> None:
        super().__init__()
        self._order = order
        self.lock = threading.RLock()
        self._random = random.Random(order if isinstance(order, int) else 0)
        self.streams = [Stream(self, device) for device in range(devices)]
        self.thread = _Thread(self.streams)
        self._copying: dict[int, Stream] = {}
        self.contexts: set[int] = set()
        self.pinned_stretches: list[int] = []
        self._in_place: dict[int, int] = {}
        self.allocated = [0] * devices
        self.most_allocated = [0] * devices
        self.pinned_bytes = self.most_pinned = 0
        self.waits = self.crossings = 0
        self.pins = True
        self._pinned: dict[int, int] = {}
        self._kept_pinned = 0

    # ---- what dcpring asks ----

    def stream(self, device: torch.device) -> Any:
        self.streams.append(Stream(self, _index(device)))
        return self.streams[-1]

    def copy_stream(self, device: torch.device) -> Any:
        if _index(device) not in self._copying:
            self._copying[_index(device)] = self.stream(device)
        return self._copying[_index(device)]

    @contextlib.contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        before = self.thread.device
        self.set_device(_index(device))
        yield
        self.thread.device = before  # as torch does it, where the device has no context

    def set_device(self, index: int) -> None:
        self.contexts.add(index)
        self.thread.device = index

    def current_stream(self, device: torch.device) -> Any:
        return self.thread.streams[_index(device)]

    def event(self, device: torch.device) -> Any:
        return Event()

    def synchronize(self, device: torch.device) -> None:
        for stream in self.streams[:]:
            if stream.device == _index(device):
                stream.synchronize()

    def pinned(self, size: int) -> Tensor:
        memory = (ctypes.c_uint8 * max(size, 1))()
        rounded = 1 << (max(size, 1) - 1).bit_length()
        kept = min(self._kept_pinned, rounded)
        self._kept_pinned -= kept
        self.pinned_bytes += rounded - kept
        self.most_pinned = max(self.most_pinned, self.pinned_bytes)
        start = ctypes.addressof(memory)
        self._pinned[start] = size
        weakref.finalize(memory, self._unpin, start, rounded)
        return torch.frombuffer(memory, dtype=torch.uint8)[:size].fill_(0x77)

    def can_pin(self) -> bool:
        return self.pins

    def pin(self, address: int, size: int) -> None:
        assert address not in self._pinned
        self.contexts.add(self.thread.device)
        self.pinned_stretches.append(size)
        self._in_place[address] = size
        self._pinned[address] = size
        self.pinned_bytes += size
        self.most_pinned = max(self.most_pinned, self.pinned_bytes)

    def unpin(self, address: int) -> None:
        self.pinned_bytes -= self._pinned.pop(address)
        del self._in_place[address]
        ctypes.c_uint8.from_address(address).value  # noqa: B018 - it is still there

    def _unpin(self, start: int, rounded: int) -> None:
        self._pinned.pop(start, None)
        self._kept_pinned += rounded

    def give_back_pinned(self) -> None:
        self.pinned_bytes -= self._kept_pinned
        self._kept_pinned = 0

    def is_pinned(self, tensor: Tensor) -> bool:
        begin = tensor.data_ptr()
        for start, size in list(self._pinned.items()):
            if start <= begin < start + max(size, 1):
                assert begin + tensor.nbytes <= start + size or not tensor.is_contiguous(), (
                    "a copy across two stretches"
                )
                return True
        return False

    # ---- the order of work ----

    def submitted(self, stream: Stream) -> None:
        if self._order == "at once":
            stream.run(len(stream.work))
        elif isinstance(self._order, int) and self._random.random() < 0.5:
            self._run_some()

    def wait_for(self, stream: Stream, place: int) -> None:
        with self.lock:
            self.waits += 1
            if self._order == "others first":
                for other in self.streams:
                    other.run(len(other.work) if other is not stream else place)
            elif isinstance(self._order, int):
                self._run_some()
            stream.run(place)

    def _run_some(self) -> None:
        for stream in self._random.sample(self.streams, len(self.streams)):
            stream.run(self._random.randint(stream.done, len(stream.work)))

    # ---- what tests do with it ----

    def tensor(self, tensor: Tensor, device: int = 0) -> Tensor:
        """The same on a device: its strides, offset and memory beside it too, as it is there now."""
        storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # type: ignore[call-overload]
        moved = storage.to(f"{TYPE}:{device}").as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        self.synchronize(moved.device)
        moved = torch._conj(moved) if tensor.is_conj() else moved
        moved = torch._neg_view(moved) if tensor.is_neg() else moved
        return moved.requires_grad_(tensor.requires_grad)

    def write(self, tensor: Tensor, value: Any, stream: Stream | None = None) -> None:
        """Changes a tensor as a kernel does: later, in a stream, the current one of its device by default."""
        memory = _memory(tensor)
        (stream or self.thread.streams[_index(tensor.device)]).submit(lambda: memory.copy_(torch.as_tensor(value)))

    def extra_bytes(self, work: Callable[[], Any]) -> int:
        """What tensors on the first device take at most while the work is done, beside those that are there."""
        self.synchronize(torch.device(TYPE, 0))
        before = self.most_allocated[0] = self.allocated[0]
        work()
        return self.most_allocated[0] - before

    @property
    def pinned_in_place(self) -> int:
        """Of the pinned bytes those of memory that is not torch's."""
        return sum(self._in_place.values())

    @property
    def under_way(self) -> int:
        return sum(stream.under_way for stream in self.streams)

    def values(self, tensor: Tensor) -> Tensor:
        """A copy, when all that was submitted to its device is done."""
        self.synchronize(tensor.device)
        return _memory(tensor).clone().resolve_conj().resolve_neg()


_active: Twin | None = None


def _twin() -> Twin:
    assert _active is not None, "this is a tensor of a twin that is gone"
    return _active


def twin_in_use() -> Twin:
    """For tests of any accelerator."""
    return _twin()


@contextlib.contextmanager
def active(twin: Twin) -> Iterator[Twin]:
    """The twin is what dcpring takes for this machine's accelerator."""
    global _active
    before, clone = accelerators.active, torch.UntypedStorage.clone
    _active, accelerators.active = twin, twin
    torch.UntypedStorage.clone = lambda self: _clone(self) if self.device.type == TYPE else clone(self)  # type: ignore
    try:
        yield twin
    finally:
        _active, accelerators.active, torch.UntypedStorage.clone = None, before, clone  # type: ignore[method-assign]


@pytest.fixture(params=ORDERS, ids=str)
def twin(request: pytest.FixtureRequest) -> Iterator[Twin]:
    with active(Twin(request.param)) as made:
        yield made


@pytest.fixture(params=["needed only", "others first"])
def strict_twin(request: pytest.FixtureRequest) -> Iterator[Twin]:
    """The two orders that find most; for tests that take long."""
    with active(Twin(request.param)) as made:
        yield made


def _index(device: torch.device) -> int:
    assert device.type == TYPE, device
    return device.index or 0


# ---- memory: tensors are made of it by DLPack, whose device type 12 is torch's PrivateUse1 ----


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _DType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        *(("data", ctypes.c_void_p), ("device", _Device), ("ndim", ctypes.c_int), ("dtype", _DType)),
        *(("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64))),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_blocks: dict[int, tuple[Any, ...]] = {}
"""What is allocated on the devices, by address: the memory, DLPack's structure, the twin, the stream and the size."""

_structures: dict[int, int] = {}
"""The addresses of the memory, by those of DLPack's structures."""


@_Deleter
def _free(managed: Any) -> None:
    start = _structures.pop(ctypes.addressof(managed.contents))
    memory, _, twin, stream, size = _blocks.pop(start)
    twin.allocated[stream.device] -= size
    stream.submit(_Freed(memory, size))


def _allocate(size: int, device: torch.device | None) -> Tensor:
    twin = _twin()
    stream = twin.thread.streams[_index(torch.device(device or TYPE))]
    memory = (ctypes.c_uint8 * max(size, 1))()
    ctypes.memset(memory, FREED, size)
    shape, strides = (ctypes.c_int64 * 1)(size), (ctypes.c_int64 * 1)(1)
    start = ctypes.addressof(memory)
    view = _DLTensor(start, _Device(12, stream.device), 1, _DType(1, 8, 1), shape, strides, 0)
    managed = _Managed(view, None, _free)
    _blocks[start] = (memory, (managed, shape, strides), twin, stream, size)
    _structures[ctypes.addressof(managed)] = start
    twin.allocated[stream.device] += size
    twin.most_allocated[stream.device] = max(twin.most_allocated[stream.device], twin.allocated[stream.device])
    return torch.utils.dlpack.from_dlpack(_new_capsule(ctypes.addressof(managed), b"dltensor", None))


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a device's tensor for the CPU, its bits as they are. Whoever has it may come after the tensor."""
    storage = tensor.untyped_storage()
    data = torch.empty(0, dtype=torch.uint8)
    if storage.nbytes():
        data = torch.frombuffer(_blocks[storage.data_ptr()][0], dtype=torch.uint8)
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(data.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]


def _memory(tensor: Tensor) -> Tensor:
    """The same with the tensor's values: conjugate and negative where it is."""
    made = _bytes_of(tensor)
    made = torch._conj(made) if tensor.is_conj() else made
    return torch._neg_view(made) if tensor.is_neg() else made


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """torch makes new storages by allocators, of which this device has none."""
    made = _allocate(storage.nbytes(), storage.device)
    into, values = _bytes_of(made), torch.frombuffer(_blocks[storage.data_ptr()][0], dtype=torch.uint8)
    _twin().thread.streams[_index(made.device)].submit(lambda: into.copy_(values))
    return made.untyped_storage()


# ---- operations ----


def _empty(
    size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None, **_: Any
) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    return _allocate(math.prod(size) * dtype.itemsize, device).view(dtype).view(size)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    reach = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return _allocate(reach * dtype.itemsize, device).view(dtype).as_strided(size, stride)


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if "cpu" not in (source.device.type, target.device.type):
        into, values = _memory(target), _memory(source)
        _twin().thread.streams[_index(source.device)].submit(lambda: into.copy_(values))
    elif target.device.type == "cpu":
        _download(source, target, non_blocking)
    else:
        _upload(source, target, non_blocking)
    return target


def _same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether a copy is one stretch of bytes."""
    return (
        a.dtype == b.dtype and _is_dense(a) and (a.stride() == b.stride() or (a.is_contiguous() and b.is_contiguous()))
    )


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _temporary(like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(like.shape, dtype=dtype, device=device)


def _download(source: Tensor, target: Tensor, non_blocking: bool) -> None:
    """As CUDA's copy: bytes first, with temporaries on the device where they do not lie alike, then the lazy bits."""
    if source.numel() == 0:
        return
    stream = _twin().thread.streams[_index(source.device)]
    if not _same_layout(source, target):
        dtype = target.dtype if non_blocking else source.dtype
        temporary = _temporary(source, dtype, source.device)
        into, values = _bytes_of(temporary), _bytes_of(source)
        stream.submit(lambda: into.copy_(values))
        temporary = torch._conj(temporary) if source.is_conj() else temporary
        temporary = torch._neg_view(temporary) if source.is_neg() else temporary
        staged = target if target.is_contiguous() and dtype == target.dtype else torch.empty(target.shape, dtype=dtype)
        _download(temporary, staged, non_blocking)
        if staged is not target:
            target.copy_(staged)
        return
    into, values = _plain_bits(target), _bytes_of(source)
    stream.submit(Copy(into, values))
    if not (non_blocking and _twin().is_pinned(target)):
        stream.synchronize()
    _settle_bits(source, target, into)


def _upload(source: Tensor, target: Tensor, non_blocking: bool) -> None:
    if source.numel() == 0:
        return
    stream = _twin().thread.streams[_index(target.device)]
    if source.dtype != target.dtype and not non_blocking:
        source = source.to(target.dtype)
    if not _same_layout(source, target):
        temporary = _temporary(target, source.dtype, target.device)
        _upload(source.contiguous(), temporary, non_blocking)
        target.copy_(temporary)
        return
    values = _plain_bits(source)
    if not _twin().is_pinned(source):
        values = values.clone()
    into = _bytes_of(target)
    stream.submit(Copy(into, values))
    if source.is_conj() != target.is_conj():
        stream.submit(lambda: into.conj_physical_())
    if source.is_neg() != target.is_neg():
        stream.submit(lambda: into.neg_())
    if not non_blocking:
        stream.synchronize()


def _plain_bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    tensor = torch._conj(tensor) if tensor.is_conj() else tensor
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def _settle_bits(source: Tensor, target: Tensor, into: Tensor) -> None:
    """On the host, at once, whether or not the bytes have arrived: as CUDA's copy does."""
    if source.is_conj() != target.is_conj():
        into.conj_physical_()
    if source.is_neg() != target.is_neg():
        into.neg_()


def _cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    memories = [_memory(tensor) for tensor in tensors]
    shape = torch.cat([memory.to("meta") for memory in memories], dim).shape
    made = torch.empty(shape, dtype=tensors[0].dtype, device=tensors[0].device)
    into = _bytes_of(made)
    _twin().thread.streams[_index(made.device)].submit(lambda: into.copy_(torch.cat(memories, dim)))
    return made


def _any_other(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Waits for everything, works on the CPU, and copies what is new to the device."""
    taken: list[tuple[Tensor, Tensor]] = []

    def take(value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type == TYPE:
            _twin().synchronize(value.device)
            taken.append((_memory(value), value))
            return taken[-1][0]
        return type(value)(map(take, value)) if type(value) in (list, tuple) else value

    result = op(*take(args), **{name: take(value) for name, value in kwargs.items() if name != "device"})
    changed = [tensor for memory, tensor in taken if memory is result]
    if changed or not isinstance(result, Tensor) or not taken:
        return changed[0] if changed else result
    return result.to(taken[0][1].device)


_SET = ("set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor")


def _as_on_the_cpu(op: Any) -> Callable[..., Any]:
    """Views: the CPU's kernels make them of any storage."""
    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return lambda *args, **kwargs: op.redispatch(cpu, *args, **kwargs)


class _Module:
    """What torch looks up in ``torch.privateuseone``."""

    def is_available(self) -> bool:
        return False  # to those who look for an accelerator to use

    def is_initialized(self) -> bool:
        return True

    def _lazy_init(self) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 0


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


def _register() -> list[Any]:
    """For the whole process, which takes no notice: ``torch.accelerator`` is as it was."""
    torch._register_device_module(TYPE, _Module())
    guard = _Guard()
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    aten, rest = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    for name in (*("as_strided", "view", "view_as_real", "view_as_complex", "unfold", "_reshape_alias"), *_SET):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        aten.impl(name, _as_on_the_cpu(op), "PrivateUse1")
    aten.impl("empty.memory_format", _empty, "PrivateUse1")
    aten.impl("empty_strided", _empty_strided, "PrivateUse1")
    aten.impl("_copy_from", _copy, "PrivateUse1")
    aten.impl("cat", _cat, "PrivateUse1")
    aten.impl("is_pinned", lambda *_, **__: False, "PrivateUse1")
    for key in ("Conjugate", "Negative"):
        for name in ("_copy_from", "is_pinned"):
            aten.impl(name, torch.library.fallthrough_kernel, key)
    rest.fallback(_any_other, "PrivateUse1")
    return [guard, aten, rest]


_registered = _register()
"""Kept, as what is registered goes with it."""
