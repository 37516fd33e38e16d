"""Unpickles data, and nothing but data: objects of a checkpoint, and its metadata.

What a pickle names is looked up in the list below, by exact name, and nowhere else: nothing is imported for it. The
machine that runs pickles (csrc/py/pickle/unpickle.c) makes numbers, texts and containers by itself, and comes here for
all else, so that these are the only things that a pickle can have done:

- ``call`` and ``make``: a function or class of the list, each with a check of its own for the arguments it may have.
  What is in the list stores its arguments; what would call, import, open or evaluate is not in it. Where a real
  constructor could take memory or time that its arguments don't (``bytes(1 << 60)``, ``Fraction("1e999999999")``),
  the check refuses them.
- ``build``: sets the state of an instance whose exact type the list knows how to. Classes, functions, and the objects
  that a process shares have no such entry, so nothing that outlives the load can be changed.
- ``extend`` and ``update``: adds to a deque, an OrderedDict, a Counter, a defaultdict of a harmless factory.

What the user, or torch.serialization.add_safe_globals, has declared safe is called as it is. NumPy's part of the list
is in ``unpickler_numpy``, as it is only imported for a pickle that names NumPy.
"""

from __future__ import annotations

import _compat_pickle
import argparse
import array
import collections
import datetime
import decimal
import enum
import fractions
import functools
import io
import logging
import pathlib
import pickletools
import random
import re
import time
import types
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata

from dcpring import _C
from dcpring.torchside.dcp import MEMORY_FORMATS, OLD_METADATA, StorageInfo, StoredProperties
from dcpring.torchside.serialization import LAYOUT_GETTER, QUANTIZATIONS, REBUILD_AS_TYPE, REBUILDERS
from dcpring.torchside.versions import say_once

_MOST_BITS = 1 << 13
"""Of the parts of a Fraction, which are divided by their greatest common divisor."""


Trust = bool | Literal["warn"]
"""What a load does about a pickle that asks for more than data: refuses it (False), loads it whatever that runs (True),
or loads it and says so in the log ("warn")."""


class RefusedError(Exception):
    """A pickle asks for more than data. The message goes on from "it".

    Attributes:
        name: of what it asks for, for ``safe_globals``.
    """

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name


def warn_of(refused: RefusedError) -> None:
    """Says, once for each class, that a pickle is loaded all the same."""
    say_once(
        logging.WARNING,
        f"what is loaded holds more than plain data and tensors ({refused}): it is loaded as torch does, which runs "
        "code that the checkpoint names. Load it with trusted=False to have it refused, "
        f"or with safe_globals=[{refused.name or '...'}] if that is known to be harmless",
    )


class _WrongError(Exception):
    """A function or class of the list was given what no pickle of data gives it."""


# ---- the list ----

_NAMES: dict[tuple[str, str], Any] = {}
_CALL: dict[int, Callable[..., Any]] = {}
"""What REDUCE may call, by id: what is called need not be hashable."""
_MAKE: dict[int, Callable[..., Any]] = {}
"""The same for NEWOBJ."""
_BUILD: dict[type, Callable[[Any, Any], None]] = {}
_TUPLES: set[type] = set()
"""Classes that the machine calls by itself, with one tuple."""
_RECORDS: dict[type, dict[str, tuple[type, ...]]] = {}
"""Classes of nothing but attributes, which the machine makes and fills by itself, and the types that some attributes
must have. Any others may be set, but for Python's own (``__class__``)."""
_PLAIN: set[tuple[str, str]] = set()
"""What ``torch.load(weights_only=True)`` knows, too: a pickle that names no more can be handed on as it is."""


def know(
    value: Any,
    *names: str,
    call: Callable[..., Any] | None = None,
    make: Callable[..., Any] | None = None,
    build: Callable[[Any, Any], None] | None = None,
    plain: bool = False,
) -> None:
    """Adds to the list.

    Args:
        value: what the names stand for.
        names: "module:name", of all versions of Python and its packages.
        call, make: what calling it, and making an instance of it, means; raises _WrongError for wrong arguments.
        build: sets the state of its instances.
        plain: torch's own list has it.
    """
    for name in names:
        module, _, attribute = name.partition(":")
        _NAMES[module, attribute] = value
        if plain:
            _PLAIN.add((module, attribute))
    if call is not None:
        _CALL[id(value)] = call
    if make is not None:
        _MAKE[id(value)] = make
    if build is not None:
        _BUILD[value] = build


def typed(make: Callable[..., Any], *kinds: Any, least: int | None = None) -> Callable[..., Any]:
    """``make`` for arguments of exactly these types (tuples: any of them; ``object``: of any), of which the last may
    be missing, down to ``least`` of them."""
    fewest = len(kinds) if least is None else least
    allowed = [kind if isinstance(kind, tuple) else (kind,) for kind in kinds]

    def checked(*args: Any) -> Any:
        if not fewest <= len(args) <= len(allowed):
            raise _WrongError
        for value, kind in zip(args, allowed, strict=False):
            if type(value) not in kind and object not in kind:
                raise _WrongError
        return make(*args)

    return checked


def bare(cls: type) -> Callable[..., Any]:
    """Makes an instance whose state comes later."""
    return typed(functools.partial(object.__new__, cls))


def require(condition: bool) -> None:
    if not condition:
        raise _WrongError


def _set_attributes(instance: Any, state: Any) -> None:
    """As unpickling does it; names of Python's own are none of a pickle's business."""
    require(type(state) is dict)
    for name in state:
        require(type(name) is str and not name.startswith("__"))
    instance.__dict__.update(state)


# ---- Python ----

_NUMBER = (int, float, bool)

for _cls in (int, float, bool, str, list, tuple, dict, object):
    know(_cls, f"builtins:{_cls.__name__}")
know(Ellipsis, "builtins:Ellipsis")
know(NotImplemented, "builtins:NotImplemented")


def _bytes(value: bytes = b"") -> bytes:
    return value


def _bytearray(value: Any = b"", encoding: str = "latin-1") -> bytearray:
    require(encoding in ("latin-1", "latin1"))
    return bytearray(value if type(value) is bytes else value.encode("latin-1"))


def _encode(text: str, encoding: str) -> bytes:
    require(encoding in ("latin1", "latin-1"))
    return text.encode("latin-1")


know(bytes, "builtins:bytes", call=typed(_bytes, bytes, least=0), make=typed(_bytes, bytes, least=0))
know(bytearray, "builtins:bytearray", call=typed(_bytearray, (bytes, str), str, least=0), plain=True)
know(_encode, "_codecs:encode", call=typed(_encode, str, str), plain=True)
know(
    complex, "builtins:complex", call=typed(complex, _NUMBER, _NUMBER), make=typed(complex, _NUMBER, _NUMBER),
    plain=True,
)  # fmt: skip
# The machine has looked at what will be in them.
know(set, "builtins:set", call=typed(set, list), plain=True)
know(frozenset, "builtins:frozenset", call=typed(frozenset, list))
know(range, "builtins:range", call=typed(range, int, int, int))
know(slice, "builtins:slice", call=typed(slice, object, object, object))


def _reconstructor(cls: Any, base: Any, state: Any) -> Any:
    """How protocols 0 and 1 make an instance."""
    require(base is object and state is None and id(cls) in _MAKE)
    return _MAKE[id(cls)]()


know(_reconstructor, "copyreg:_reconstructor", call=typed(_reconstructor, object, object, object))


def _attribute(cls: Any, name: str) -> Any:
    """A member of an enumeration, as Python 3.11.2 (Debian 12) and its neighbours pickle it, or a class within another,
    as protocols below 4 do. The outer class has been asked for by name, so that it is in the list, or safe."""
    require(isinstance(cls, type))
    if isinstance(cls, enum.EnumMeta) and name in cls.__members__:
        return cls.__members__[name]
    found = vars(cls).get(name)
    require(isinstance(found, type) and found.__qualname__ == f"{cls.__qualname__}.{name}")
    return found


know(_attribute, "builtins:getattr", call=typed(_attribute, object, str))

# ---- the standard library ----

know(
    collections.OrderedDict, "collections:OrderedDict", call=typed(collections.OrderedDict),
    make=typed(collections.OrderedDict), build=_set_attributes, plain=True,
)  # fmt: skip
know(collections.Counter, "collections:Counter", call=typed(collections.Counter, dict, least=0), plain=True)


def _deque(values: Any = (), most: int | None = None) -> Any:
    return collections.deque(values, most)


know(collections.deque, "collections:deque", call=typed(_deque, (tuple, list), (int, type(None)), least=0))

_FACTORIES = (
    *(int, float, complex, bool, str, bytes, bytearray, list, tuple, dict, set, frozenset),
    *(collections.OrderedDict, collections.Counter, collections.deque),
)


def _defaultdict(factory: Any = None) -> Any:
    require(factory is None or any(factory is known for known in _FACTORIES))
    return collections.defaultdict(factory)


know(collections.defaultdict, "collections:defaultdict", call=typed(_defaultdict, object, least=0))
know(types.SimpleNamespace, "types:SimpleNamespace", call=typed(types.SimpleNamespace), build=_set_attributes)
for _cls in (argparse.Namespace, collections.ChainMap, collections.UserDict, collections.UserList):
    know(_cls, f"{_cls.__module__}:{_cls.__name__}", make=bare(_cls), build=_set_attributes)

_timezone = typed(datetime.timezone, datetime.timedelta, str, least=1)
know(datetime.timezone, "datetime:timezone", call=_timezone, make=_timezone)
know(datetime.timedelta, "datetime:timedelta", call=typed(datetime.timedelta, int, int, int))
know(datetime.date, "datetime:date", call=typed(datetime.date, bytes))
know(datetime.time, "datetime:time", call=typed(datetime.time, bytes, datetime.timezone, least=1))
know(datetime.datetime, "datetime:datetime", call=typed(datetime.datetime, bytes, datetime.timezone, least=1))
know(time.struct_time, "time:struct_time", call=typed(time.struct_time, tuple, dict, least=1))
know(decimal.Decimal, "decimal:Decimal", call=typed(decimal.Decimal, str))

_FRACTION = re.compile(r"-?\d{1,4000}(/\d{1,4000})?", re.ASCII)


def _fraction(*parts: Any) -> fractions.Fraction:
    if len(parts) == 1:
        require(type(parts[0]) is str and _FRACTION.fullmatch(parts[0]) is not None)
    else:
        require([*map(type, parts)] == [int, int] and max(part.bit_length() for part in parts) <= _MOST_BITS)
    return fractions.Fraction(*parts)


def _set_uuid(instance: uuid.UUID, state: Any) -> None:
    require(type(state) is dict and {"int"} <= state.keys() <= {"int", "is_safe"})
    require(type(state["int"]) is int and 0 <= state["int"] < 1 << 128)
    require(state.get("is_safe") in (None, 0, -1))
    instance.__setstate__(state)  # type: ignore[attr-defined]


know(fractions.Fraction, "fractions:Fraction", call=_fraction)
know(uuid.UUID, "uuid:UUID", make=bare(uuid.UUID), build=_set_uuid)


def _path(cls: type[pathlib.PurePath]) -> Callable[..., Any]:
    def make(*parts: Any) -> pathlib.PurePath:
        require(all(type(part) is str for part in parts))
        return cls(*parts)

    return make


for _cls in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.Path, pathlib.PurePath):
    know(_cls, f"pathlib:{_cls.__name__}", f"pathlib._local:{_cls.__name__}", call=_path(_cls))
# Python has WindowsPath on Windows only.
know(pathlib.PureWindowsPath, "pathlib:WindowsPath", "pathlib._local:WindowsPath")


def _set_buffer(instance: Any, state: Any) -> None:
    """Content, place, and attributes, of which there are none; a text buffer's ends of lines are the second."""
    kinds = [bytes, int] if type(instance) is io.BytesIO else [str, type(state[1]), int]
    require(type(state) is tuple and [*map(type, state[:-1])] == kinds and kinds[1] in (int, str, type(None)))
    require(type(state[-1]) in (dict, type(None)) and not state[-1])
    instance.__setstate__(state)


know(io.BytesIO, "_io:BytesIO", "io:BytesIO", make=typed(io.BytesIO), build=_set_buffer)
know(io.StringIO, "_io:StringIO", "io:StringIO", make=typed(io.StringIO), build=_set_buffer)


def _array(code: str, values: list[Any]) -> Any:
    require(all(type(value) in (int, float, str) for value in values))
    return array.array(code, values)


def _array_from_bytes(cls: Any, code: str, format_code: int, data: bytes) -> Any:
    require(cls is array.array)
    return _REAL_ARRAY(cls, code, format_code, data)


_REAL_ARRAY: Any = array.array("b").__reduce_ex__(4)[0]


know(array.array, "array:array", call=typed(_array, str, list))
know(_array_from_bytes, "array:_array_reconstructor", call=typed(_array_from_bytes, object, str, int, bytes))


def _set_random(instance: random.Random, state: Any) -> None:
    require(type(state) is tuple and len(state) == 3 and state[0] == 3 and type(state[1]) is tuple)
    require(all(type(word) is int for word in state[1]) and type(state[2]) in (float, type(None)))
    instance.setstate(state)


know(random.Random, "random:Random", call=typed(lambda: random.Random(0)), build=_set_random)

# ---- torch ----


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."), None)
    require(isinstance(found, torch.layout))
    return found  # type: ignore[return-value]


know(torch.Size, "torch:Size", plain=True)  # which looks at what is in it by itself
_TUPLES.add(torch.Size)
know(torch.device, "torch:device", call=typed(torch.device, str, int, least=1), plain=True)
know(_layout, ":".join(LAYOUT_GETTER), call=typed(_layout, str), plain=True)
know(torch.Tensor, "torch:Tensor", plain=True)
know(torch.UntypedStorage, "torch.storage:UntypedStorage", plain=True)
know(torch.nn.Parameter, "torch.nn.parameter:Parameter", plain=True)
for _name, _value in vars(torch).items():
    if isinstance(_value, torch.dtype | QUANTIZATIONS):
        know(_value, f"torch:{_name}", plain=True)


def _rebuild(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's that makes a tensor; hooks are functions that a tensor calls, and torch pickles none."""

    def checked(*args: Any) -> Any:
        require(not any(type(value) is collections.OrderedDict and value for value in args))
        require(not any(isinstance(value, type) and not issubclass(value, torch.Tensor) for value in args))
        _check_attributes(args)
        return function(*args)

    return checked


def _check_attributes(states: Iterable[Any]) -> None:
    """Of attributes that will be set, by name: none of Python's own, and no hooks."""
    for state in states:
        if isinstance(state, dict):
            require(all(type(name) is str and not name.startswith(("__", "_backward_hooks")) for name in state))


def _from_type(function: Any, cls: Any, args: Any, state: Any) -> Any:
    require(any(function is known for known in REBUILDERS.values()) and type(args) is tuple)
    require(isinstance(cls, type) and issubclass(cls, torch.Tensor))
    _check_attributes(state if type(state) is tuple else (state,))
    rebuilt = _CALL[id(function)](*args)
    return REBUILD_AS_TYPE[1](lambda: rebuilt, cls, (), state)


for _name, _function in REBUILDERS.items():
    know(_function, _name, call=_rebuild(_function), plain=True)
know(REBUILD_AS_TYPE[1], REBUILD_AS_TYPE[0], call=typed(_from_type, object, object, object, object), plain=True)

# ---- DCP's metadata ----

_METADATA = dcp_metadata.__name__


for _record in (
    dcp_metadata.Metadata,
    dcp_metadata.TensorStorageMetadata,
    dcp_metadata.BytesStorageMetadata,
    dcp_metadata.ChunkStorageMetadata,
    dcp_metadata.StorageMeta,
    dcp_metadata.MetadataIndex,
    StorageInfo,
):
    know(_record, f"{_record.__module__}:{_record.__qualname__}", make=bare(_record))
    _RECORDS[_record] = {}
# RingSavePlanner's, where stock has pickled it.
_CALL[id(dcp_metadata.Metadata)] = typed(dcp_metadata.Metadata, *[object] * 5, least=1)
# They are hashed, by what is in them.
_RECORDS[dcp_metadata.MetadataIndex] = {
    "fqn": (str,),
    "offset": (torch.Size, type(None)),
    "index": (int, type(None)),
}


def _set_properties(instance: Any, state: Any) -> None:
    require(type(state) is tuple and len(state) >= 5)
    instance.__setstate__(state)


know(
    StoredProperties, f"{_METADATA}:TensorProperties", f"{OLD_METADATA}:TensorProperties",
    make=bare(StoredProperties), build=_set_properties,
)  # fmt: skip
_RECORDS[StoredProperties] = {}
know(
    MEMORY_FORMATS, f"{_METADATA}:_MEM_FORMAT_ENCODING", f"{OLD_METADATA}:MEM_FORMAT_ENCODING",
    call=typed(MEMORY_FORMATS, int),
)  # fmt: skip

# ---- the reader ----


def _present_name(module: str, name: str) -> tuple[str, str]:
    """Protocols below 3 have the names of Python 2."""
    if (module, name) in _NAMES:
        return module, name
    renamed: tuple[str, str] = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
    return _compat_pickle.IMPORT_MAPPING.get(renamed[0], renamed[0]), renamed[1]


def checked_globals(given: Iterable[Any]) -> tuple[Any, ...]:
    """The argument ``safe_globals``. TypeError for what is no class or function, nor a pair of one and its name."""
    found = tuple(given)
    for item in found:
        if not callable(item) and not (isinstance(item, tuple) and len(item) == 2):
            raise TypeError(f"safe_globals={given!r}: must be a list of classes and functions, not of their names")
    return found


class Safe:
    """What a user allows besides the list, and what torch.serialization.add_safe_globals was given.

    It is made for one save or load, most of which never ask: so it is put together when one does.
    """

    def __init__(self, safe_globals: Iterable[Any] = ()) -> None:
        self._given = checked_globals(safe_globals)

    @functools.cached_property
    def names(self) -> dict[str, Any]:
        """By full name."""
        found = {}
        for item in (*torch.serialization.get_safe_globals(), *self._given):
            value, name = item if isinstance(item, tuple) else (item, f"{item.__module__}.{item.__qualname__}")
            found[name] = value
        return found

    @functools.cached_property
    def ids(self) -> dict[int, str]:
        """The same by id, with their names."""
        return {id(value): name for name, value in self.names.items()}


class Unpickler:
    """Reads one pickle. ``persistent_load`` may be set, as ``torch.load`` does.

    Attributes:
        plain: whether nothing was named that ``torch.load(weights_only=True)`` would not know.
        tuples, records: see ``_TUPLES`` and ``_RECORDS``.
    """

    tuples = _TUPLES
    records = _RECORDS

    def __init__(self, data: Any, safe: Safe) -> None:
        self._data = data
        self._safe = safe
        self.plain = True

    def load(self) -> Any:
        """What was pickled.

        Raises:
            RefusedError: it asks for more than data.
            ValueError: it is damaged.
        """
        try:
            return _C.unpickle(self._data, self)
        except (RefusedError, ValueError, MemoryError):
            raise
        except Exception as error:  # what is wrong with arguments ends in errors of any kind
            raise ValueError(f"the pickle is damaged: {error}") from error

    # ---- what the machine asks for ----

    def find_class(self, module: str, name: str) -> Any:
        key = _present_name(module, name)
        if module.partition(".")[0] == "numpy":
            from dcpring.format import unpickler_numpy  # noqa: F401  # adds to the list
        if key in _NAMES:
            self.plain &= key in _PLAIN
            return _NAMES[key]
        full = ".".join(key)
        if full in self._safe.names:
            return self._safe.names[full]
        raise RefusedError(f"it refers to {full}", full)

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        handler = _CALL.get(id(function))
        if handler is not None:
            try:
                return handler(*args)
            except _WrongError:
                pass
        if id(function) in self._safe.ids:
            return function(*args)
        raise self._wrong("calls", function)

    def make(self, cls: Any, args: tuple[Any, ...], named: Any = None) -> Any:
        handler = _MAKE.get(id(cls))
        if handler is not None and not named:
            try:
                return handler(*args)
            except _WrongError:
                pass
        if id(cls) in self._safe.ids:
            return cls.__new__(cls, *args, **(named or {}))
        raise self._wrong("calls", cls)

    def build(self, instance: Any, state: Any) -> None:
        cls = type(instance)
        handler = _BUILD.get(cls)
        if handler is not None:
            try:
                handler(instance, state)
            except _WrongError:
                raise self._wrong("sets the state of", cls) from None
        elif id(cls) in self._safe.ids:
            _build_as_pickle_does(instance, state)
        elif state is not None:
            raise self._wrong("sets the state of", instance if isinstance(instance, type) else cls)

    def extend(self, container: Any, items: list[Any]) -> None:
        if type(container) is not collections.deque and id(type(container)) not in self._safe.ids:
            raise self._wrong("adds to", type(container))
        container.extend(items)

    def update(self, container: Any, pairs: list[Any]) -> None:
        if type(container) not in _MAPPINGS and id(type(container)) not in self._safe.ids:
            raise self._wrong("sets items of", type(container))
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            container[key] = value

    def persistent_load(self, pid: Any) -> Any:
        raise RefusedError("it holds persistent ids, which only tensors have", "persistent_load")

    def refuse(self, code: int, number: int) -> None:
        opcode = pickletools.code2op[chr(code)].name  # type: ignore[attr-defined]
        raise RefusedError(f"it has the opcode {opcode} ({number}), which data has no need of", opcode)

    def _wrong(self, does: str, what: Any) -> RefusedError:
        """Says no, naming what by its type unless it is one of the list: its repr might never end."""
        named = next((f"{module}.{name}" for (module, name), value in _NAMES.items() if value is what), None)
        if named is None:
            cls = what if isinstance(what, type) else type(what)
            named = self._safe.ids.get(id(what), f"{cls.__module__}.{cls.__qualname__}")
        return RefusedError(f"it {does} {named} as no pickle of plain data does", named)


_MAPPINGS = (collections.OrderedDict, collections.Counter, collections.defaultdict)


def _build_as_pickle_does(instance: Any, state: Any) -> None:
    """For classes that were declared safe."""
    if hasattr(instance, "__setstate__"):
        instance.__setstate__(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if state:
        instance.__dict__.update(state)
    for name, value in (slots or {}).items():
        setattr(instance, name, value)


def unpickle(data: Any, safe: Safe | None = None) -> Any:
    """What was pickled, if it is data; raises as ``Unpickler.load``."""
    return Unpickler(data, safe or Safe()).load()
