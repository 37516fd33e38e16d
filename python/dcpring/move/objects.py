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
import struct
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.serialization import DEFAULT_PROTOCOL

from dcpring import _C
from dcpring.base.text import some
from dcpring.errors import CheckpointError, naming
from dcpring.format.unpickler import RefusedError, Safe, Unpickler
from dcpring.torchside.tensors import PLAIN_TYPES

_END = struct.Struct("<4sHHHHIIH")
_CENTRAL = struct.Struct("<4s6xH8xIIHHH8xI")
_LOCAL = struct.Struct("<26xHH")
_END64 = struct.Struct("<4s28xQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_LARGE = 0xFFFFFFFF
_PICKLE, _DATA = "data.pkl", "data/"
_SCRIPT = "constants.pkl"
"""What tells TorchScript, which torch.load would hand to torch.jit."""

_OLD_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
_HEAD_BYTES = 32
"""What comes before that number, and it."""

PICKLE_CURE = "keep numbers, strings, tensors and containers of them there"
"""What to do about a value that cannot be pickled."""

NOT_SAVED = "it is no archive of torch.save"

_HARMLESS = re.compile(
    rb"torch(._utils)? (_rebuild_tensor_v[23]|_rebuild_parameter|[A-Za-z0-9]+Storage|float\d+|bfloat16|u?int\d+|Size)"
    rb"|collections OrderedDict|__builtin__ set|torch.storage UntypedStorage|_codecs encode"
)
"""What can be read whatever its arguments are; the last stands for bytes, which are long, and is so unless somebody's
own class calls it otherwise: that the load tells."""


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
    pickled = _pickle_of(data)
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
    entry = entries.get(_DATA + pid[2])
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


# ---- archives ----


def is_saved(file: io.BytesIO) -> bool:
    """Whether it begins as what torch.save makes: a zip archive or, as until torch 1.6, a pickled number."""
    head = bytes(file.getbuffer()[:_HEAD_BYTES])
    return head[:2] == b"PK" or _OLD_MAGIC in head


def entries_of(data: memoryview) -> dict[str, slice] | None:
    """Where the entries of an archive lie, by their names in it; None for what is no archive, or TorchScript.

    All of the file must be what torch finds there, too: nothing lies before the archive or behind it. And nothing is
    compressed: torch unpacks whatever it is given.

    Raises:
        ValueError: it is not as ``torch.save`` makes it.
    """
    if data[:2] != b"PK":
        return None
    try:
        listed = list(_listed(data))
    except struct.error as error:
        raise ValueError("the archive is cut off") from error
    found = dict(listed)
    if len(found) < len(listed) or _PICKLE not in found:
        raise ValueError(f"the archive has no entry {_PICKLE!r}, or has one twice")
    return None if _SCRIPT in found else found


def _pickle_of(data: memoryview) -> memoryview | None:
    """The pickle, which is the first entry of an archive of ``torch.save``; None where it is not."""
    try:
        name, place = next(_listed(data))
    except (struct.error, ValueError, StopIteration):
        return None
    return data[place] if name == _PICKLE else None


def _listed(data: memoryview) -> Iterator[tuple[str, slice]]:
    count, at = _directory_of(data)
    for _ in range(count):
        magic, method, packed, plain, name_size, extra, more, header = _CENTRAL.unpack_from(data, at)
        at += _CENTRAL.size
        _, _, name = str(data[at : at + name_size], "utf-8").partition("/")
        at += name_size
        if _LARGE in (plain, packed, header):
            plain, packed, header = _large(bytes(data[at : at + extra]), plain, packed, header)
        at += extra + more
        begin = header + _LOCAL.size + sum(_LOCAL.unpack_from(data, header))
        if method:
            raise ValueError(f"its entry {name!r} is compressed: torch.jit.save does that, torch.save never")
        if magic != b"PK\1\2" or packed != plain or begin + plain > len(data):
            raise ValueError("the archive has an entry that torch.save does not make")
        yield name, slice(begin, begin + plain)


def _directory_of(data: memoryview) -> tuple[int, int]:
    """How many entries an archive has, and where they are listed: the large form of its end is what torch reads."""
    end = len(data) - _END.size
    magic, _, _, _, count, size, at, comment = _END.unpack_from(data, max(end, 0))
    if end >= _LOCATOR64.size and data[end - _LOCATOR64.size : end - _LOCATOR64.size + 4] == b"PK\6\7":
        end -= _LOCATOR64.size
        _, _, place, _ = _LOCATOR64.unpack_from(data, end)
        magic64, count, size, at = _END64.unpack_from(data, place)
        if magic64 != b"PK\6\6" or place + _END64.size != end:
            raise ValueError("the end of the archive's directory is damaged")
        end = place
    if magic != b"PK\5\6" or comment or at + size != end:
        raise ValueError("the end of the archive's directory is damaged")
    return count, at


def _large(extra: bytes, *values: int) -> list[int]:
    """Sizes and offsets, of which those of 4 GiB and more stand in an extra field."""
    missing = values.count(_LARGE)
    while missing and len(extra) >= 4:
        kind, size = struct.unpack_from("<HH", extra)
        if kind == 1:
            numbers = iter(struct.unpack_from(f"<{missing}Q", extra, 4))
            return [next(numbers) if value == _LARGE else value for value in values]
        extra = extra[4 + size :]
    return list(values)


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
    pickled = _pickle_of(memoryview(archive))
    names = None if pickled is None else _C.names_in_pickle(pickled)
    if names is not None and all(map(_is_harmless, names)):
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


def _is_harmless(named: tuple[bytes, bytes]) -> bool:
    return _HARMLESS.fullmatch(b" ".join(named)) is not None


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

_MOST_NAMED = 10


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


TO_A_COMMAND = "trusted=True, or safe_globals=[{}]; a command, with --trusted"
"""What takes such objects, for ``refused_text`` where whoever reads it has only looked at a checkpoint."""


def refused_text(
    refused: Mapping[str, str],
    load: str = "RingReader(..., safe_globals=[{}]), or with trusted=True",
    save: str = "",
) -> str:
    """Keys and classes that a load refuses, and what to do about it.

    Args:
        refused: by key.
        load: what to load with; the classes go into its braces.
        save: what is saving, if they are being saved.
    """
    shown = some([f"{key!r} ({name})" for key, name in refused.items()], _MOST_NAMED)
    names = sorted(set(refused.values()))
    allowed = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
    text = f"what a load refuses by default, as it is more than plain data: {shown}. Load with {load.format(allowed)}"
    if not save:
        return text
    return (
        f"{text}; or keep numbers, strings, tensors and containers of them in the state. {save} with the same "
        'safe_globals, or with objects="allow", does not ask'
    )
