"""Tensors that safetensors hold as small codes, and beside them the scales of their blocks.

Two forms are known, those that PyTorch's QuantizedHuggingFaceStorageReader reads:

- FP8: ``x.weight`` of a float8 dtype in two dimensions, and ``x.weight_scale_inv`` with a factor for each block of
  128 x 128 elements, or one for all. Others of a float8 dtype beside which there is a ``_scale_inv``, and stacks of
  such matrices with stacks of factors, are the same.
- MXFP4: ``x_blocks`` [..., groups, bytes], two codes of 4 bits to a byte, the first in the lower half, and ``x_scales``
  [..., groups] with an exponent for each group. What is made of it has the shape [..., groups x bytes x 2].
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator
from typing import NamedTuple

import torch

from dcpring.base.windows import Box, common_box
from dcpring.errors import CorruptCheckpointError
from dcpring.format.model_files import Model, Whole
from dcpring.format.safetensors import Place, StoredPart

FLOAT8_SCALE, FLOAT8_CODES = "_scale_inv", ".weight"
MXFP4_SCALE, MXFP4_CODES = "_scales", "_blocks"

BLOCK_SIZE = 128
"""Rows and columns of a block of FP8, if nobody says otherwise."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What can be made of codes."""

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)

_PACKED = "float4_e2m1fn_x2"
"""Codes of which a byte holds two. torch has a dtype of this name since 2.8."""

Ints = tuple[int, ...]


class Quantised(NamedTuple):
    """One such tensor, or what one shard of its codes makes of it, or a part of that: one group in each row, a matrix.

    Attributes:
        codes: where they are stored.
        origin: where among these begin those that this is made of.
        stored_sizes: of these codes, as bytes that are elements of the last dimension.
        scales: where those that it needs are, and the box of all scales that each of them is.
        scale_name: of the scales.
        begins: of what is made of the codes, in the tensor.
        shape, dtype: of what is made of them.
        whole: the shape of the tensor.
        block: elements of the last dimension, and of the one before, that share a scale.
        per_byte: codes in a byte.
    """

    codes: StoredPart
    origin: Ints
    stored_sizes: Ints
    scales: tuple[tuple[Box, StoredPart], ...]
    scale_name: str
    begins: Ints
    shape: Ints
    whole: Ints
    dtype: torch.dtype
    block: tuple[int, int]
    per_byte: int

    @property
    def place(self) -> Place:
        """By which a load knows it, whatever its name: from its first byte to its last."""
        own = self.boxes((0,) * len(self.shape), self.shape)[0][1]
        first, last, stride = 0, 0, 1
        for begin, length, size in zip(reversed(self.origin), reversed(own), reversed(self.stored_sizes), strict=True):
            first, last, stride = first + begin * stride, last + (length - 1) * stride, stride * size
        return self.codes.file, self.codes.begin + first, last + 1 if 0 not in own else 0

    def boxes(self, offsets: Ints, lengths: Ints) -> tuple[Box, Box]:
        """What a box is made of: one of these codes, and one of all scales."""
        codes, sizes = _divided(offsets, lengths, 1, self.per_byte)
        at = tuple(map(operator.add, self.origin, codes))
        return (at, sizes), _divided(self._in_all(offsets), lengths, *self.block)

    def how(self, offsets: Ints) -> tuple[str, int, int, int, int, int]:
        """How the core makes a box that begins there: see ``_C.load``."""
        rows, columns = self.block
        codes = _PACKED if self.per_byte == 2 else str(self.codes.dtype).removeprefix("torch.")
        begins = self._in_all(offsets)
        skipped = begins[-2] % rows if rows > 1 else 0
        return codes, offsets[-1] % self.per_byte, rows, columns, skipped, begins[-1] % columns

    def _in_all(self, offsets: Ints) -> Ints:
        return tuple(map(operator.add, self.begins, offsets))


def _divided(offsets: Ints, lengths: Ints, rows: int, columns: int) -> Box:
    """A box in a tensor whose elements each stand for so many of the last two dimensions."""
    by = (*(1,) * (len(offsets) - 2), rows, columns)[-len(offsets) :]
    begins = tuple(map(operator.floordiv, offsets, by))
    ends = (-(-(offset + length) // each) for offset, length, each in zip(offsets, lengths, by, strict=True))
    return begins, tuple(map(operator.sub, ends, begins))


def find_quantised(model: Model, dtype: torch.dtype, block_size: int) -> dict[str, list[Quantised]]:
    """The quantised tensors of a model, by the names of their codes: for each of their parts what is made of it.

    Raises:
        CorruptCheckpointError: codes without scales, or scales that do not fit them.
    """
    found: dict[str, list[Quantised]] = {}
    for name in model.tensors:
        codes = _codes_of(name)
        whole = model.tensors.get(codes)
        if whole is not None and (whole.dtype in FLOAT8 or codes.endswith((FLOAT8_CODES, MXFP4_CODES))):
            found[codes] = _quantised(model, codes, name, dtype, block_size)
    places = {each.codes: each for parts in found.values() for each in parts}
    for name, whole in model.tensors.items():
        if name not in found and name.endswith(FLOAT8_CODES) and whole.dtype in FLOAT8:
            if whole.parts[0] not in places:
                raise CorruptCheckpointError(
                    f"{name!r} is {whole.dtype}, and there is no {name + FLOAT8_SCALE!r} by "
                    "which it is to be scaled; RingHFReader loads it as it is stored",
                    str(model.files.directory / whole.parts[0].file),
                )
            found[name] = [places[part] for part in whole.parts]  # another name of the same tensor
    return found


def _codes_of(scales: str) -> str:
    for ending, codes in ((FLOAT8_SCALE, ""), (MXFP4_SCALE, MXFP4_CODES)):
        if scales.endswith(ending):
            return scales.removesuffix(ending) + codes
    return ""


def _quantised(model: Model, codes: str, scales: str, dtype: torch.dtype, block_size: int) -> list[Quantised]:
    first, second = model.tensors[codes], model.tensors[scales]
    is_mxfp4 = codes.endswith(MXFP4_CODES)
    try:
        form = _mxfp4(first, second) if is_mxfp4 else _float8(first, second, block_size)
    except ValueError as error:
        path = str(model.files.directory / second.parts[0].file)
        raise CorruptCheckpointError(f"{scales!r} cannot be the scales of {codes!r}: {error}", path) from None
    factors = tuple(((part.offsets, part.shape), part) for part in second.parts)
    if math.prod(second.shape) == 1:
        factors = ((((0,) * len(form.shape), (1,) * len(form.shape)), second.parts[0]),)
    found = []
    for part in first.parts:
        for origin, sizes, (begins, shape) in form.made_of(part.offsets, part.shape):
            used = factors
            if len(factors) > 1:
                needed = _divided(begins, shape, *form.block)
                used = tuple(pair for pair in factors if common_box(pair[0], needed))
            made = begins, shape, form.shape, dtype, form.block, form.per_byte
            found.append(Quantised(part, origin, sizes, used, scales, *made))
    return found


class _Form(NamedTuple):
    """Of a whole tensor, as ``Quantised`` has them of parts. ``group``: bytes of codes in a row that share a scale."""

    shape: Ints
    block: tuple[int, int]
    per_byte: int
    group: int | None = None

    def made_of(self, offsets: Ints, lengths: Ints) -> Iterator[tuple[Ints, Ints, Box]]:
        """The boxes that are made of one of the codes; ``Quantised.origin`` and ``stored_sizes`` of each."""
        if self.group is None:
            outer = lengths[:-2] if math.prod(lengths) else ()
            for at in itertools.product(*map(range, outer)):  # blocks of one matrix end where the next one begins
                origin = (*at, *(0,) * (len(lengths) - len(at)))
                begins = tuple(map(operator.add, offsets, origin))
                yield origin, lengths, (begins, (*(1 for _ in at), *lengths[len(at) :]))
            return
        *before, group, byte = offsets
        *others, groups, count = lengths
        # What lies side by side in the shard does not in the tensor, where each group has lost some bytes.
        is_cut = count < self.group and math.prod(lengths) > 0
        together = 1 if is_cut else groups
        for number in range(groups if is_cut else 1):
            origin = (*(0 for _ in others), number * count)
            begins = (*before, 2 * ((group + number) * self.group + byte))
            yield origin, (*others, groups * count), (begins, (*others, 2 * together * count))


def _mxfp4(codes: Whole, scales: Whole) -> _Form:
    if codes.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"they are {codes.dtype} and {scales.dtype}, and both must be uint8")
    if len(codes.shape) < 2 or codes.shape[:-1] != scales.shape:
        shapes = f"{list(codes.shape)} and {list(scales.shape)}"
        raise ValueError(f"their shapes are {shapes}, the second without the last number of the first")
    *outer, groups, size = codes.shape
    return _Form((*outer, groups * size * 2), (1, max(2 * size, 1)), 2, size)


def _float8(codes: Whole, scales: Whole, block_size: int) -> _Form:
    if codes.dtype not in FLOAT8 or not scales.dtype.is_floating_point:
        raise ValueError(f"they are {codes.dtype} and {scales.dtype}, and not float8 and floats")
    if len(codes.shape) < 2:
        raise ValueError(f"the codes have shape {list(codes.shape)}, and a matrix, or a stack of some, is needed")
    *outer, rows, columns = codes.shape
    needed = (*outer, -(-rows // block_size), -(-columns // block_size))
    if scales.shape != needed and all(size == 1 for size in scales.shape):
        if outer:
            raise ValueError(f"there is one for all of {list(codes.shape)}, and a stack needs some for each matrix")
        return _Form(codes.shape, (max(rows, 1), max(columns, 1)), 1)  # one for all
    if scales.shape != needed:
        blocks = f"blocks of {block_size} x {block_size} elements of {list(codes.shape)}"
        raise ValueError(f"their shape is {list(scales.shape)}, and {blocks} need {list(needed)}; see block_size=")
    return _Form(codes.shape, (block_size, block_size), 1)
