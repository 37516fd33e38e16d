"""Elements that the core converts are those that torch makes, bit for bit; a NaN is a NaN, of whichever bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dcpring import _C

FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
SMALL = (*FLOATS[1:], "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def converted(tensor: Tensor, dtype: str) -> Tensor:
    name = str(tensor.dtype).removeprefix("torch.")
    made = _C.convert(name, dtype, bytearray(tensor.view(torch.uint8).numpy()))
    return torch.frombuffer(bytearray(made), dtype=torch.uint8).view(getattr(torch, dtype))


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    nan = expected.float().isnan()
    assert torch.equal(found.float().isnan(), nan)
    bits = BITS[expected.itemsize]
    wrong = ((found.view(bits) != expected.view(bits)) & ~nan).nonzero()
    assert len(wrong) == 0, (wrong[:3].tolist(), found[wrong[0][0]], expected[wrong[0][0]])


@pytest.mark.parametrize("name", SMALL)
def test_every_code(name: str) -> None:
    dtype = getattr(torch, name)
    codes = torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int32)
    elements = codes.to(BITS[dtype.itemsize]).view(dtype)
    assert_same_bits(converted(elements, "float32"), elements.to(torch.float32))


@pytest.mark.parametrize("name", FLOATS)
def test_rounding(name: str) -> None:
    """Of random bits, of what lies around each value of the small formats, and of all exponents."""
    dtype = getattr(torch, name)
    random = torch.randint(-(1 << 31), 1 << 31, (200_000,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    near = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float().view(torch.int32)
    beside = torch.cat([near + step for step in (-1, 0, 1, 1 << 14, (1 << 14) + 1, 1 << 15)])
    values = torch.cat([random, beside.view(torch.float32), torch.linspace(-600, 600, 100_001)])
    if name == "float8_e4m3fn" and torch.tensor(1e9).to(dtype).isnan():
        values = values[~(values.abs() > 464)]  # before torch 2.13 what is too large became NaN
    assert_same_bits(converted(values, name), values.to(dtype))
    doubles = values.double() * (1 + 2**-30)
    assert_same_bits(converted(doubles, name), doubles.to(dtype))


def test_what_cannot_be_converted() -> None:
    for from_dtype, to_dtype, data in (("int32", "float32", b"0000"), ("float32", "int8", b"0000"), ("x", "y", b"")):
        with pytest.raises(ValueError, match="cannot be made"):
            _C.convert(from_dtype, to_dtype, data)
    with pytest.raises(ValueError, match="3 bytes"):
        _C.convert("float32", "bfloat16", b"000")
