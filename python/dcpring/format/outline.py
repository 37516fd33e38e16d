"""DCP's metadata read without torch, which takes seconds to import: the same attributes, with plain values.

The command line looks at checkpoints this way. Only what DCP's own pickles name is known here; for any other pickle
there is ``format.unpickler``, which knows what torch has, and says what is refused, and why. Any thread may call this.
"""

from __future__ import annotations

from typing import Any, ClassVar

from dcpring import _C

DTYPE_BYTES = {
    **dict.fromkeys(("complex128",), 16),
    **dict.fromkeys(("float64", "double", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32", "qint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "bits16"), 2),
    **dict.fromkeys(("uint8", "int8", "bool", "qint8", "quint8", "quint4x2", "quint2x4"), 1),
    **dict.fromkeys(("bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), 1),
    **dict.fromkeys(("float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
}
"""Bytes of an element, by the name of torch's dtype."""


class DtypeName(str):
    """The name of a dtype of torch: "float32"."""


class _Size(tuple[int, ...]):
    """torch's, of which only what is in it matters."""


class Metadata:
    """What DCP has under this name, as far as the pickle has set it; so are the others."""

    state_dict_metadata: Any
    planner_data: Any
    storage_data: Any
    version: Any


class TensorStorageMetadata:
    pass


class BytesStorageMetadata:
    pass


class ChunkStorageMetadata:
    pass


class StorageMeta:
    pass


class MetadataIndex:
    fqn: Any
    offset: Any = None


class StorageInfo:
    pass


class _Properties:
    """A tensor's; the rest of them says nothing of what is stored."""

    dtype: Any
    layout: Any


def _layout(name: str) -> str:
    return name.removeprefix("torch.")


def _nothing(*args: Any) -> None:
    """Of memory formats, and of paths to where a checkpoint once was."""


_DCP = "torch.distributed.checkpoint"
_RECORDS = (
    *(Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, StorageMeta, MetadataIndex),
    *(StorageInfo, _Properties),
)
_NAMES: dict[tuple[str, str], Any] = {
    **{(f"{_DCP}.metadata", record.__name__): record for record in _RECORDS[:6]},
    (f"{_DCP}.filesystem", "_StorageInfo"): StorageInfo,
    (f"{_DCP}.metadata", "TensorProperties"): _Properties,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _nothing,
    ("torch.serialization", "_get_layout"): _layout,
    ("torch", "Size"): _Size,
    ("pathlib", "PosixPath"): _nothing,
    ("pathlib._local", "PosixPath"): _nothing,
}


class _UnknownError(Exception):
    """A pickle has what DCP's own have not."""


class _OutlineReader:
    """What ``_C.unpickle`` asks for names, calls and states; see ``format.unpickler.Unpickler``."""

    tuples = frozenset({_Size})
    records: ClassVar = {record: dict[str, tuple[type, ...]]() for record in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPE_BYTES:
            return DtypeName(name)
        found = _NAMES.get((module, name))
        return self.refuse() if found is None else found

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        return function(*args) if function in (_layout, _nothing) else self.refuse()

    def make(self, cls: Any, args: tuple[Any, ...], named: Any = None) -> Any:
        return cls() if cls in _RECORDS and not args and not named else self.refuse()

    def build(self, instance: Any, state: Any) -> None:
        if type(instance) is not _Properties or type(state) is not tuple:
            self.refuse()
        instance.dtype, instance.layout, *_ = state

    def refuse(self, *args: Any) -> Any:
        raise _UnknownError

    extend = update = persistent_load = refuse


def plain_value(pickled: memoryview) -> Any:
    """A value whose pickle names nothing, such as a text. ValueError where it is another, or damaged."""
    try:
        return _C.unpickle(pickled, _OutlineReader())
    except (_UnknownError, TypeError) as error:
        raise ValueError("the object is no plain value") from error


def outline(pickled: memoryview) -> Metadata | None:
    """The metadata in a pickle; None where it is damaged, or has what only ``format.unpickler`` knows."""
    try:
        found = _C.unpickle(pickled, _OutlineReader())
    except MemoryError:
        raise
    except Exception:  # reading it with torch's classes tells
        return None
    return found if type(found) is Metadata else None
