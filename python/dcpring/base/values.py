"""Equality by value: one digest for all objects that are equal, in every process.

Neither the order of sets and mappings counts, nor what parts objects share in memory, nor Python's hash seed.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import os
from collections import OrderedDict
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from dcpring.torchside.tensors import PLAIN_TYPES

_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_MOST_LEVELS = 100


def digest(value: Any) -> bytes:
    """16 bytes that tell values apart. Of what cannot be taken apart as pickling would, only the class counts."""
    return _Digester().of(value, _MOST_LEVELS)


def _hashed(kind: str, *parts: bytes) -> bytes:
    state = hashlib.blake2b(kind.encode(), digest_size=16)
    for part in parts:
        state.update(b"%d:" % len(part))
        state.update(part)
    return state.digest()


def _name(kind: Any) -> str:
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', '')}"


class _Digester:
    """Remembers what it has been to: what is held in several places is looked at once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bytes]] = {}

    def of(self, value: Any, levels: int) -> bytes:
        kind = type(value)
        if kind in _ATOMS:
            return _hashed(kind.__qualname__, repr(value).encode(errors="surrogatepass"))
        if id(value) in self._known:
            return self._known[id(value)][1]
        # Until it is known, it stands for itself in what it holds.
        self._known[id(value)] = (value, _hashed("within itself"))
        found = self._of_container(value, levels - 1) if levels else _hashed(_name(kind))
        self._known[id(value)] = (value, found)
        return found

    def _of_container(self, value: Any, levels: int) -> bytes:
        kind = type(value)
        if kind in (list, tuple):
            return _hashed(kind.__qualname__, *(self.of(part, levels) for part in value))
        if kind in (set, frozenset):
            return _hashed("set", *sorted(self.of(part, levels) for part in value))
        if kind in (dict, OrderedDict):
            return self._of_items("dict", value.items(), levels)
        if isinstance(value, Tensor):
            return _of_tensor(value)
        if isinstance(value, PurePath):  # since Python 3.13 pickled as what it was made of
            return _hashed(kind.__qualname__, *map(os.fsencode, value.parts))
        return self._of_object(value, levels)

    def _of_items(self, kind: str, items: Any, levels: int) -> bytes:
        pairs = (self.of(key, levels) + self.of(value, levels) for key, value in items)
        return _hashed(kind, *sorted(pairs))

    def _of_object(self, value: Any, levels: int) -> bytes:
        """What pickling would take it apart into."""
        kind = type(value)
        if isinstance(value, type):
            return _hashed("class", _name(value).encode())
        try:
            parts = value.__reduce_ex__(4)
        except Exception:  # it is not made to be pickled
            return _hashed(_name(kind))
        if isinstance(parts, str):
            return _hashed(_name(kind), parts.encode())
        function, args, state, items, pairs = (*parts, None, None, None)[:5]
        return _hashed(
            _name(kind),
            _name(function).encode(),
            self.of(args, levels),
            self.of(state, levels),
            self.of(list(items or ()), levels),
            self._of_items("items", pairs or (), levels),
        )


def _of_tensor(tensor: Tensor) -> bytes:
    about = f"{tensor.dtype} {list(tensor.shape)} {tensor.layout}".encode()
    if tensor.is_meta:
        return _hashed("meta tensor", about)
    with torch.no_grad():
        plain = tensor.detach().cpu()
        if type(plain) not in PLAIN_TYPES or plain.layout != torch.strided or plain.is_quantized:
            archive = io.BytesIO()
            torch.save(plain, archive)
            return _hashed("tensor", about, archive.getvalue())
        plain = plain.resolve_conj().resolve_neg().contiguous()
        return _hashed("tensor", about, ctypes.string_at(plain.data_ptr(), plain.nbytes))
