"""Objects of a checkpoint: archives of ``torch.save``, whose pickles are read by our own unpickler.

What holds no tensors, as most objects do, is read here alone. What does goes through ``torch.load``, which makes the
tensors and is given our unpickler in place of its own.

A planner that is not ours unpickles what it is given without limits. So it gets exactly what has been checked: an
archive made anew around the checked pickle, never one in which another reader could find another pickle. Where the
pickle names what only we know, or what another version of Python calls otherwise, the value is pickled again.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import types
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.serialization import DEFAULT_PROTOCOL

from dcpring import _C
from dcpring.errors import CheckpointError, naming
from dcpring.format.archive import DATA, entries_of, is_plainly_data, is_saved, pickle_of, refused_text
from dcpring.format.unpickler import RefusedError, Safe, Unpickler
from dcpring.torchside.tensors import PLAIN_TYPES

PICKLE_CURE = "keep numbers, strings, tensors and containers of them there"
"""What to do about a value that cannot be pickled."""

NOT_SAVED = "it is no archive of torch.save"


class _NeedsTensorsError(RefusedError):
    """Not for others to see."""


@dataclass
class Loaded:
    """An object that was read.

    Attributes:
        value: the object; its tensors are where the load was told to put them.
        has_tensors: whether there are any in it.
        plain: whether the pickle names nothing that ``torch.load(weights_only=True)`` does not know.
    """

    value: Any
    has_tensors: bool
    plain: bool
    _archive: io.BytesIO
    _pickle: memoryview | None
    _safe: Safe

    def stream(self) -> io.BytesIO:
        """An archive of it for ``torch.load``, which may go by it without looking."""
        if self.plain and not self.has_tensors and self._pickle is not None:
            return io.BytesIO(_C.archive_of_pickle(self._pickle))
        if self.plain and self.has_tensors:
            self._archive.seek(0)
            return self._archive
        return io.BytesIO(archive_of(load(self._archive, self._safe, None).value if self.has_tensors else self.value))


def _bytes_of(archive: io.BytesIO) -> memoryview:
    """What is in it, not copied. Python crashes where a view of ``getbuffer()`` is garbage, as an error leaves it."""
    return memoryview(archive.getvalue())


def load(archive: io.BytesIO, safe: Safe, map_location: Any = "cpu") -> Loaded:
    """Reads an object without running code of it.

    Raises:
        RefusedError: it holds more than data and tensors.
        Exception: it is damaged, which ends in errors of any kind.
    """
    if not is_saved(archive):
        raise ValueError(NOT_SAVED)
    data = _bytes_of(archive)
    pickled = pickle_of(data)
    if pickled is not None:
        reader = _WithoutTensors(pickled, safe)
        try:
            return Loaded(reader.load(), False, reader.plain, archive, pickled, safe)
        except _NeedsTensorsError:
            pass
    value, plain = load_with_torch(archive, safe, map_location, entries_of(data))
    return Loaded(value, True, plain, archive, None, safe)


class _WithoutTensors(Unpickler):
    """Stops at the first storage of a tensor, which torch.load makes."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            raise _NeedsTensorsError("it holds tensors", "")
        return super().find_class(module, name)


def load_with_torch(
    file: Any, safe: Safe, map_location: Any, entries: dict[str, slice] | None, *, mmap: bool = False
) -> tuple[Any, bool]:
    """``torch.load`` by our unpickler; where it cannot take that, by its own list and what was declared safe.

    Args:
        file: a stream, or a path.
        entries: of the zip file; None where it is another kind of file.

    Returns: the value, and whether its pickle is ``plain``.
    """
    if hasattr(file, "seek"):
        file.seek(0)
    forced = os.getenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true")
    if entries is None or forced:
        try:
            with torch.serialization.safe_globals([(value, name) for name, value in safe.names.items()]):
                return torch.load(file, map_location, weights_only=True, mmap=mmap), False
        except pickle.UnpicklingError as error:
            raise RefusedError(*_refused_by_torch(error)) from error
    readers: list[Unpickler] = []
    there = entries

    class Reader(Unpickler):
        def __init__(self, stream: Any, **_: Any) -> None:
            super().__init__(stream.read(), safe)
            readers.append(self)

        def load(self) -> Any:
            self._load_storage = self.persistent_load  # torch sets it
            self.persistent_load = self._load_checked  # type: ignore[method-assign]
            return super().load()

        def _load_checked(self, pid: Any) -> Any:
            _check_storage(pid, there)
            return self._load_storage(pid)

    module = types.SimpleNamespace(__name__=__name__, Unpickler=Reader)
    value = torch.load(file, map_location, pickle_module=module, weights_only=False, mmap=mmap)
    return value, all(reader.plain for reader in readers)


def _check_storage(pid: Any, entries: dict[str, slice]) -> None:
    """torch takes as many bytes as the pickle says, whatever the archive has."""
    if type(pid) is not tuple or [*map(type, pid)][2:] != [str, str, int] or len(pid) != 5 or pid[0] != "storage":
        raise ValueError("the pickle has a persistent id of a kind that torch.save does not make")
    itemsize = 1 if pid[1] is torch.UntypedStorage else pid[1].dtype.itemsize
    entry = entries.get(DATA + pid[2])
    if entry is None or not 0 <= pid[4] * itemsize <= entry.stop - entry.start:
        raise ValueError(f"the archive does not hold the {pid[4]} elements of the storage {pid[2]!r}")


def _refused_by_torch(error: pickle.UnpicklingError) -> tuple[str, str]:
    """What torch stumbled over, out of its long message."""
    text = str(error)
    found = re.search(r"GLOBAL (\S+)", text)
    if found:
        return f"it refers to {found[1]}", found[1]
    detail = re.search(r"WeightsUnpickler error:\s*(.*)", text)
    return (detail[1] if detail else text.split("\n", 1)[0]).rstrip(". "), ""


# ---- what a value is ----

_DATA_TYPES: tuple[type, ...] = (str, int, float, bool, type(None), bytes, complex, bytearray, torch.Size, torch.dtype)
_ORDINARY: tuple[type, ...] = (*_DATA_TYPES, *PLAIN_TYPES)


def archive_of(value: Any) -> bytes:
    """A value as ``torch.save`` writes it, which takes twenty times as long for a number."""
    if _C.holds_only(_DATA_TYPES, OrderedDict, value):
        return _C.archive_of_pickle(pickle.dumps(value, protocol=DEFAULT_PROTOCOL))
    archive = io.BytesIO()
    torch.save(value, archive)
    return archive.getvalue()


# ---- what a load would refuse ----


def refusal(archive: bytes, safe: Safe) -> str:
    """The name of what a load would refuse in an object, "" where it would not.

    Most objects name nothing, or tensors: that is seen without reading them.
    """
    if is_plainly_data(archive):
        return ""
    try:
        load(io.BytesIO(archive), safe)
    except RefusedError as error:
        return error.name or str(error)
    except MemoryError:
        raise
    except Exception:
        return ""  # it is damaged, or cannot be read here: loading it tells
    return ""


def refusals(values: Iterable[tuple[str, Any]], safe: Safe) -> dict[str, str]:
    """What a load would refuse of objects that are not pickled yet, by key."""
    found = {}
    for key, value in values:
        if _C.holds_only(_ORDINARY, OrderedDict, value):  # it need not be pickled
            continue
        name = refusal(_saved(key, value), safe)
        if name:
            found[key] = name
    return found


def _saved(key: str, value: Any) -> bytes:
    with naming(lambda: f"cannot save {key!r}", PICKLE_CURE):
        return archive_of(value)


ObjectPolicy = Literal["warn", "error", "allow"]


@dataclass
class Judge:
    """Looks at the objects of a save, as they are pickled, for what a load would refuse.

    Attributes:
        objects: "warn" notes it, "error" raises.
        safe: what those who load will allow.
        refused: by key.
    """

    objects: ObjectPolicy
    safe: Safe
    refused: dict[str, str]

    def look(self, key: str, archive: bytes) -> None:
        name = refusal(archive, self.safe)
        if name:
            self.refused[key] = name
            if self.objects == "error":
                raise CheckpointError(f"cannot save {refused_text(self.refused, save='RingWriter')}")
