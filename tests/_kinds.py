"""State dicts that hold every kind of value, and how to compare them bit by bit."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from dcpring import RingReader, RingWriter

DTYPE_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32"),
    *("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
KNOWN_DTYPES = tuple(getattr(torch, name) for name in DTYPE_NAMES)


def can_copy(dtype: torch.dtype) -> bool:
    """Whether this torch copies tensors of a dtype, as stock's reader does: 2.9 has one that it does not."""
    try:
        torch.empty(1, dtype=dtype).copy_(torch.empty(1, dtype=dtype))
    except NotImplementedError:
        return False
    return True


DTYPES = tuple(filter(can_copy, KNOWN_DTYPES))
WRITERS: dict[str, type[FileSystemWriter]] = {"stock": FileSystemWriter, "ring": RingWriter}
READERS: dict[str, type[FileSystemReader]] = {"stock": FileSystemReader, "ring": RingReader}
PAIRS = (("ring", "stock"), ("stock", "ring"), ("ring", "ring"))
IO = tuple({"engine": engine, "direct": direct} for engine in ("uring", "threads") for direct in (True, False))


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    """Every bit at random, NaNs included; of a bool the lowest."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


def raw(tensor: Tensor) -> bytes:
    """The elements' bytes in row-major order, conjugation and negation done."""
    plain = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


def poisoned(tensor: Tensor) -> Tensor:
    """A contiguous destination for the tensor, whose bytes show whether they were written."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
    empty.view(-1).view(torch.uint8).fill_(0x5A)
    return empty


def of_all_dtypes() -> dict[str, Tensor]:
    found = {f"{dtype}".removeprefix("torch."): random(dtype, 5, 8) for dtype in DTYPES}
    found |= {f"{name}.scalar": random(tensor.dtype) for name, tensor in list(found.items())}
    return found


def of_all_shapes() -> dict[str, Tensor]:
    big = random(torch.float32, 70, 90)
    images = random(torch.float16, 3, 5, 7, 9)
    return {
        "empty": torch.empty(0),
        "empty.3d": torch.empty(4, 0, 3, dtype=torch.int16),
        "ones": torch.ones(1, 1, 1),
        "12d": random(torch.uint8, *([2] * 12)),
        "transposed": big.t(),
        "permuted": images.permute(3, 1, 0, 2),
        "expanded": big[:1].expand(11, 90),
        "expanded.scalar": torch.tensor(7.5).expand(3, 4),
        "rows": big[13:40],
        "columns": big[:, 5:61],
        "strided": big[3::7, 1::3],
        "one column": big[:, 17],
        "offset scalar": big[3, 4],
        "channels_last": images.to(memory_format=torch.channels_last),
        "channels_last_3d": random(torch.float32, 2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        "flipped": big.flip(0),
        "as_strided": torch.as_strided(big, (6, 6), (3, 2), 5),
        "overlapping": big.view(-1).unfold(0, 10, 3),
        "large": random(torch.float32, 515, 1027),
        "large.columns": random(torch.float32, 3, 700, 601)[:, 5:, 3:],
        "large.transposed": random(torch.bfloat16, 1031, 1033).t(),
        "large.odd": random(torch.uint8, (5 << 20) + 13)[7:],
    }


def of_all_views() -> dict[str, Tensor]:
    z = random(torch.complex64, 12, 10)
    return {
        "conj": z.conj(),
        "conj.t": z.conj().t()[2:9],
        "neg": z.conj().imag,
        "neg.slice": z.conj().imag[1:5, ::3],
        "real": z.real,
        "conj.half": random(torch.complex32, 9).conj(),
        "large conj": random(torch.complex128, 400, 300).conj(),
        "parameter": torch.nn.Parameter(torch.randn(4, 6)),
        "frozen parameter": torch.nn.Parameter(torch.randn(3), requires_grad=False),
        "buffer": torch.nn.Buffer(torch.randn(6)),
        "requires grad": torch.randn(5, requires_grad=True),
        "not a leaf": torch.randn(5, requires_grad=True) * 2,
        "inference": _inference_tensor(),
    }


def _inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.randn(7, 3).t()


def everything() -> dict[str, Tensor]:
    return of_all_dtypes() | of_all_shapes() | of_all_views()


def save(state: dict[str, Any], path: Path, writer: str = "ring", **options: Any) -> Any:
    made = WRITERS[writer](path, **options)
    dcp.save(state, storage_writer=made)
    return made


def load(state: dict[str, Any], path: Path, reader: str = "ring", **options: Any) -> Any:
    made = READERS[reader](path, **options)
    dcp.load(state, storage_reader=made)
    return made


def assert_same_bits(loaded: dict[str, Any], saved: dict[str, Tensor]) -> None:
    assert loaded.keys() == saved.keys()
    wrong = [key for key, tensor in saved.items() if raw(loaded[key]) != raw(tensor)]
    assert not wrong, f"not as they were saved: {wrong}"


def io_of(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Only our classes take options."""
    return options if kind == "ring" else {}


def failure(call: Callable[[], Any]) -> str:
    """What DCP says when the call fails: every rank's error with its type; "" when it does not fail."""
    try:
        call()
    except dcp.api.CheckpointException as error:
        return "; ".join(f"{type(e).__name__}: {e}" for e, _ in error.failures.values())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def stored(path: Path) -> dict[str, Any]:
    """What a checkpoint without shards has on each key: its ``_StorageInfo``."""
    metadata = pickle.loads(Path(path, ".metadata").read_bytes())
    return {index.fqn: info for index, info in metadata.storage_data.items()}


def record(path: Path, info: Any) -> bytes:
    with Path(path, info.relative_path).open("rb") as file:
        file.seek(info.offset)
        return file.read(info.length)
