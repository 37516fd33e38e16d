"""What a cast from one dtype to another can do to values: nothing, round them, or lose them."""

from __future__ import annotations

import enum
import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from dcpring.errors import CheckpointError


class Loss(enum.IntEnum):
    """What a cast can do to some value of the dtype: ``RANGE`` makes another number, or infinity, of a large one."""

    NOTHING, ROUNDS, RANGE = range(3)


class _Numbers(NamedTuple):
    """The numbers that a dtype has.

    Attributes:
        kind: 0 for integers, 1 for floats, 2 for complex numbers.
        sign: of the smallest: -1, 0 or 1.
        top: all are below two to the power of this.
        digits: significant ones, to the base of two.
        bottom: two to the power of this is the smallest that is positive.
    """

    kind: int
    sign: int
    top: int
    digits: int
    bottom: int


def _numbers(dtype: torch.dtype) -> _Numbers | None:
    """None where torch does not say."""
    if dtype == torch.bool:
        return _Numbers(0, 0, 1, 1, 0)
    try:
        if not (dtype.is_floating_point or dtype.is_complex):
            whole = torch.iinfo(dtype)
            top = whole.max.bit_length()
            return _Numbers(0, -1 if whole.min else 0, top, top, 0)
        info = torch.finfo(dtype)
        digits = 1 - round(math.log2(info.eps))
        bottom = round(math.log2(info.smallest_normal)) - digits + 1
        return _Numbers(1 + dtype.is_complex, -1 if info.min < 0 else 1, math.frexp(info.max)[1], digits, bottom)
    except (TypeError, NotImplementedError):
        return None


@functools.cache
def loss(before: torch.dtype, after: torch.dtype) -> Loss:
    """What a cast can do to a value, by the dtypes alone: ``RANGE`` if torch does not say what numbers they have.

    Floats with exponents of the same size only round, although the largest of float32 is infinity in bfloat16.
    """
    a, b = _numbers(before), _numbers(after)
    if before == after:
        return Loss.NOTHING
    if a is None or b is None or a.kind > b.kind or a.sign < b.sign or a.top > b.top:
        return Loss.RANGE
    if a.kind == 0 and b.kind and a.top == b.top and a.digits > b.digits:  # 65535 rounds to float16's infinity
        return Loss.RANGE
    return Loss.ROUNDS if a.digits > b.digits or a.bottom < b.bottom else Loss.NOTHING


def described(before: torch.dtype, after: torch.dtype) -> str:
    """A cast in words, with what it can do to values."""
    words = {Loss.NOTHING: "", Loss.ROUNDS: ", which rounds", Loss.RANGE: ", which can lose values"}
    return f"cast from {before} to {after}{words[loss(before, after)]}"


def check_values(name: str, before: Tensor, after: torch.dtype) -> None:
    """Raises CheckpointError where a cast that somebody has asked for would make another number of a float."""
    if loss(before.dtype, after) is not Loss.RANGE:
        return
    info = torch.finfo(after)
    rounded = 1 + info.eps / 4  # what is less is rounded down
    values = before.float() if before.itemsize == 1 else before
    beyond = (values > info.max * rounded) | (values < (info.min * rounded if info.min < 0 else info.min))
    if bool((beyond & values.isfinite()).any()):
        raise CheckpointError(
            f"{name!r} has values that {after} does not have, which are to be cast to it from {before.dtype}: these "
            f"reach from {info.min:g} to {info.max:g}. Choose a dtype that has them, or leave the tensor as it is"
        )
