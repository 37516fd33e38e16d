"""NumPy's part of the list in ``unpickler``: dtypes, arrays and scalars without objects in them, and random states.

A dtype's or an array's state, given to NumPy as a pickle has it, could make it read beyond its memory. So a dtype is
made of the parts by NumPy's public constructor first, which checks them, and what that says of itself is the state
that is set; an array's bytes must be as many as its shape and dtype say.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from dcpring.format.unpickler import know, require, typed

_BYTE_ORDERS = ("<", ">", "|", "=")
_MOST_FIELDS = 1000
_CODE = re.compile(r"\?|[a-zA-Z]\d{0,9}", re.ASCII)
"""A kind and a size: what else NumPy takes, it evaluates."""

_bool = (bool, int)


def _names(module: str, *attributes: str) -> list[str]:
    """Names in a module that was ``numpy.core`` before 2.0."""
    return [f"numpy.{core}.{module}:{name}" for core in ("core", "_core") for name in attributes]


# ---- dtypes ----


def _dtype(code: str, align: Any, copy: Any) -> np.dtype[Any]:
    """Always a copy: its state may follow, and others are shared by the process."""
    require(_CODE.fullmatch(code) is not None)
    made: np.dtype[Any] = np.dtype(code, align=bool(align), copy=True)
    require(not made.hasobject and made.kind in "biufcmMOSUV")
    return made


def _set_dtype(dtype: np.dtype[Any], state: Any) -> None:
    require(type(state) is tuple and len(state) in (8, 9) and state[0] in (3, 4))
    _, order, base, names, fields, size, alignment, flags = state[:8]
    require(order in _BYTE_ORDERS and type(size) is int and type(flags) is int and type(alignment) is int)
    metadata = state[8] if len(state) == 9 else None
    if base is not None:
        made = _of_base(base)
    elif names is not None:
        made = _of_fields(names, fields, size, aligned=bool(flags & 0x80))
    elif dtype.kind in "mM":
        made = _of_unit(dtype, metadata)
    elif dtype.kind in "SUV":
        require(0 <= size < 1 << 31 and (dtype.kind != "U" or size % 4 == 0))
        made = np.dtype(f"{dtype.kind}{size // 4 if dtype.kind == 'U' else size}")
    else:
        made = np.dtype(dtype.str)
    if order in "<>":
        made = made.newbyteorder(order) if names is None and base is None else made
    require(not made.hasobject and made.kind == dtype.kind and made.itemsize < 1 << 31)
    fresh = np.dtype(made, copy=True)
    dtype.__setstate__(fresh.__reduce__()[2])  # type: ignore[attr-defined]


def _of_base(base: Any) -> np.dtype[Any]:
    require(type(base) is tuple and len(base) == 2 and isinstance(base[0], np.dtype))
    shape = base[1] if type(base[1]) is tuple else (base[1],)
    require(all(type(length) is int and length >= 0 for length in shape) and math.prod(shape) < 1 << 31)
    return np.dtype((base[0], shape))


def _of_fields(names: Any, fields: Any, size: int, aligned: bool) -> np.dtype[Any]:
    require(type(names) is tuple and all(type(name) is str for name in names) and len(names) <= _MOST_FIELDS)
    require(type(fields) is dict and all(type(fields.get(name)) is tuple for name in names))
    found = [fields[name] for name in names]
    require(all(len(field) in (2, 3) and isinstance(field[0], np.dtype) and type(field[1]) is int for field in found))
    described = {
        "names": list(names),
        "formats": [field[0] for field in found],
        "offsets": [field[1] for field in found],
        "itemsize": size,
    }
    if any(len(field) == 3 for field in found):
        described["titles"] = [field[2] if len(field) == 3 else None for field in found]
        require(all(type(title) in (str, type(None)) for title in described["titles"]))  # type: ignore[attr-defined]
    return np.dtype(described, align=aligned)  # type: ignore[call-overload]


def _of_unit(dtype: np.dtype[Any], metadata: Any) -> np.dtype[Any]:
    """Of dates and times; their unit is (b"ns", 1, 1, 1), the numbers being those of "25s" and of fractions."""
    if metadata is None:
        return np.dtype(dtype.str)
    require(type(metadata) is tuple and len(metadata) == 2)
    unit = metadata[1]
    require(type(unit) is tuple and len(unit) in (3, 4) and type(unit[0]) in (bytes, str))
    require(all(type(number) is int and 0 < number < 1 << 31 for number in unit[1:]))
    name = unit[0].decode("ascii") if type(unit[0]) is bytes else unit[0]
    require(name.isalpha())
    return np.dtype(f"{dtype.kind}8" if name == "generic" else f"{dtype.kind}8[{unit[1]}{name}]")


know(np.dtype, "numpy:dtype", call=typed(_dtype, str, _bool, _bool), build=_set_dtype)
for _cls in {type(np.dtype(code)) for code in "?bhilqBHILQefdgFDGmMSUV"}:
    know(_cls, build=_set_dtype)


# ---- arrays and scalars ----


def _is_whole(dtype: Any, shape: Any, data: Any) -> bool:
    return (
        isinstance(dtype, np.dtype)
        and not dtype.hasobject
        and type(shape) is tuple
        and all(type(length) is int and length >= 0 for length in shape)
        and type(data) in (bytes, bytearray)
        and math.prod(shape) * dtype.itemsize == len(data)
    )


def _empty_array(cls: Any, shape: Any, code: Any) -> np.ndarray[Any, Any]:
    require(cls is np.ndarray and shape == (0,) and code in (b"b", "b"))
    return np.empty(0, np.int8)


def _set_array(array: np.ndarray[Any, Any], state: Any) -> None:
    require(type(state) is tuple and len(state) == 5 and state[0] == 1 and type(state[3]) in _bool)
    require(_is_whole(state[1 + 1], state[1], state[4]) and type(state[4]) is bytes)
    array.__setstate__(state)


def _array_of_bytes(data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    """Protocol 5."""
    require(_is_whole(dtype, shape, data) and order in ("C", "F"))
    if dtype.itemsize == 0:
        return np.empty(shape, dtype, order)
    return np.frombuffer(data, dtype).reshape(shape, order=order)


def _scalar(dtype: Any, data: Any) -> Any:
    require(_is_whole(dtype, (), data) and type(data) is bytes)
    return _REAL_SCALAR(dtype, data)


_REAL_SCALAR: Any = np.float64(0).__reduce__()[0]
know(np.ndarray, "numpy:ndarray", build=_set_array)
know(_empty_array, *_names("multiarray", "_reconstruct"), call=typed(_empty_array, object, tuple, (bytes, str)))
know(_array_of_bytes, *_names("numeric", "_frombuffer"), call=typed(_array_of_bytes, object, object, object, object))
know(_scalar, *_names("multiarray", "scalar"), call=typed(_scalar, object, object))


# ---- random states ----

_BIT_GENERATORS = {name: getattr(np.random, name) for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")}
_PLACES = {"MT19937": ("pos", 624), "Philox": ("buffer_pos", 4)}
"""Where in its numbers a generator is: those beyond would be read from other memory."""


def _bit_generator(which: Any = "MT19937") -> Any:
    name = which if type(which) is str else getattr(which, "__name__", "")
    require(name in _BIT_GENERATORS and which in (name, _BIT_GENERATORS[name]))
    return _BIT_GENERATORS[name](0)


def _set_bit_generator(generator: Any, state: Any) -> None:
    """NumPy 2 pickles what it was seeded with beside the state."""
    whole = state
    if type(state) is tuple:
        require(len(state) == 2 and type(state[1]) in (np.random.SeedSequence, type(None)))
        state = state[0]
    name = type(generator).__name__
    require(type(state) is dict and state.get("bit_generator") == name and _is_state(state))
    if name in _PLACES:
        key, last = _PLACES[name]
        place = state["state"].get(key) if name == "MT19937" else state.get(key)
        require(type(place) is int and 0 <= place <= last)
    generator.__setstate__(whole)


def _is_state(state: Any) -> bool:
    """Numbers and arrays of integers, by name."""
    if type(state) is dict:
        return all(type(name) is str and _is_state(value) for name, value in state.items())
    if type(state) is np.ndarray:
        return bool(state.dtype.kind == "u")
    return type(state) in (int, float, str)


def _legacy(generator: Any = "MT19937", _: Any = None) -> np.random.RandomState:
    """Before 1.24 the generator came by its name, and its state with the object's."""
    made = generator if type(generator) in _BIT_GENERATORS.values() else _bit_generator(generator)
    return np.random.RandomState(made)


def _set_legacy(instance: np.random.RandomState, state: Any) -> None:
    require(type(state) is dict and _is_state(state) and type(state.get("state")) is dict)
    name = state.get("bit_generator")
    require(name == "MT19937" and type(state["state"].get("pos")) is int and 0 <= state["state"]["pos"] <= 624)
    instance.set_state(state)


def _generator(generator: Any = "MT19937", _: Any = None) -> np.random.Generator:
    made = generator if type(generator) in _BIT_GENERATORS.values() else _bit_generator(generator)
    return np.random.Generator(made)


def _set_generator(instance: np.random.Generator, state: Any) -> None:
    if state is not None:  # before 1.26 or so
        _set_bit_generator(instance.bit_generator, state)


def _seed_sequence(cls: Any, checksum: Any, state: Any) -> np.random.SeedSequence:
    require(cls is np.random.SeedSequence and type(checksum) is int and state is None)
    return np.random.SeedSequence(0)


def _set_seed_sequence(instance: Any, state: Any) -> None:
    require(type(state) is tuple and len(state) == 5)
    entropy, spawned, pool, size, key = state
    require(_is_entropy(entropy) and type(spawned) is int and type(size) is int and _is_entropy(key))
    require(type(pool) is np.ndarray and pool.dtype == np.uint32 and pool.shape == (size,) and size >= 4)
    instance.__setstate__(state)


def _is_entropy(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(type(word) is int for word in value)
    return type(value) in (int, type(None))


_CTORS = "numpy.random._pickle"
for _name, _class in _BIT_GENERATORS.items():
    know(_class, f"{_class.__module__}:{_name}", build=_set_bit_generator)
know(_bit_generator, f"{_CTORS}:__bit_generator_ctor", call=typed(_bit_generator, object, least=0))
know(_legacy, f"{_CTORS}:__randomstate_ctor", call=typed(_legacy, object, object, least=0))
know(_generator, f"{_CTORS}:__generator_ctor", call=typed(_generator, object, object, least=0))
# The second argument of both is the constructor for a generator that comes by its name.
know(np.random.RandomState, build=_set_legacy)
know(np.random.Generator, build=_set_generator)
know(np.random.SeedSequence, "numpy.random.bit_generator:SeedSequence", build=_set_seed_sequence)
know(
    _seed_sequence,
    *(
        "numpy.random.bit_generator:__pyx_unpickle_SeedSequence",
        "numpy.random._bit_generator:__pyx_unpickle_SeedSequence",
    ),
    call=typed(_seed_sequence, object, object, object),
)
