"""Synthetic jobs for the planners: what each rank of an FSDP, HSDP, DDP or TP x FSDP job holds.

The model is a decoder with the names of Hugging Face's Llama, saved with AdamW's moments. Its vocabulary is no multiple
of any number of ranks, so that shards are uneven. Rows are cut as DTensor cuts them, empty shards included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

RANKS_PER_HOST = 8
HIDDEN, KEY_VALUE, INTERMEDIATE, VOCABULARY = 8192, 1024, 28672, 128259
ITEM_BYTES = 4

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """One entry of the flat state dict. `cut` is how tensor parallelism shards the parameter."""

    path: tuple[str, ...]
    size: Ints
    cut: Literal["rows", "columns", "whole"]

    @property
    def name(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True)
class Chunk:
    """What one rank holds of a tensor. `sharded` is False for a plain tensor, which all ranks hold."""

    sharded: bool
    replicated: bool
    offsets: Ints
    lengths: Ints


@dataclass(frozen=True)
class Layout:
    key: str
    title: str
    chunk: Callable[[Tensor, int, int], Chunk]
    steps: bool = False  # AdamW's step counters too, plain tensors without dimensions


@dataclass(frozen=True)
class Job:
    layout: Layout
    tensor_count: int
    ranks: int

    @property
    def title(self) -> str:
        return f"{self.layout.title}, {self.tensor_count} x {self.ranks}"

    @property
    def items(self) -> int:
        return self.tensor_count * self.ranks

    @cached_property
    def tensors(self) -> list[Tensor]:
        moments = (*(["step"] if self.layout.steps else []), "exp_avg", "exp_avg_sq")
        parameters = list(_parameters(-(-self.tensor_count // (1 + len(moments)))))
        found = [Tensor(("model", name), size, cut) for name, size, cut in parameters]
        for name, size, cut in parameters:
            for moment in moments:
                path = ("optimizer", "state", name, moment)
                found.append(Tensor(path, (), "whole") if moment == "step" else Tensor(path, size, cut))
        return found[: self.tensor_count]

    def chunks(self, rank: int) -> Iterator[tuple[Tensor, Chunk]]:
        """What `rank` holds. Tensors of the same size share their chunk."""
        known: dict[tuple[Ints, str], Chunk] = {}
        for tensor in self.tensors:
            key = (tensor.size, tensor.cut)
            if key not in known:
                known[key] = self.layout.chunk(tensor, rank, self.ranks) if tensor.size else _plain(tensor)
            yield tensor, known[key]


def _parameters(count: int) -> Iterator[tuple[str, Ints, Literal["rows", "columns", "whole"]]]:
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN), "rows"
    for index in range(count - 1):
        layer, part = divmod(index, len(_LAYER))
        name, size, cut = _LAYER[part]
        yield f"model.layers.{layer}.{name}.weight", size, cut


_LAYER: tuple[tuple[str, Ints, Literal["rows", "columns", "whole"]], ...] = (
    ("self_attn.q_proj", (HIDDEN, HIDDEN), "rows"),
    ("self_attn.k_proj", (KEY_VALUE, HIDDEN), "rows"),
    ("self_attn.v_proj", (KEY_VALUE, HIDDEN), "rows"),
    ("self_attn.o_proj", (HIDDEN, HIDDEN), "columns"),
    ("mlp.gate_proj", (INTERMEDIATE, HIDDEN), "rows"),
    ("mlp.up_proj", (INTERMEDIATE, HIDDEN), "rows"),
    ("mlp.down_proj", (HIDDEN, INTERMEDIATE), "columns"),
    ("input_layernorm", (HIDDEN,), "whole"),
    ("post_attention_layernorm", (HIDDEN,), "whole"),
)


def _cut(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of a part, as torch.chunk has them."""
    step = -(-length // parts)
    start = min(index * step, length)
    return start, min(step, length - start)


def _plain(tensor: Tensor) -> Chunk:
    return Chunk(False, True, (0,) * len(tensor.size), tensor.size)


def _sharded(tensor: Tensor, start: int, rows: int, replicated: bool) -> Chunk:
    rest = tensor.size[1:]
    return Chunk(True, replicated, (start, *(0 for _ in rest)), (rows, *rest))


def _fsdp(tensor: Tensor, rank: int, ranks: int) -> Chunk:
    return _sharded(tensor, *_cut(tensor.size[0], ranks, rank), replicated=False)


def _hsdp(tensor: Tensor, rank: int, ranks: int) -> Chunk:
    """Sharded within a host, replicated over the hosts."""
    return _sharded(tensor, *_cut(tensor.size[0], RANKS_PER_HOST, rank % RANKS_PER_HOST), replicated=True)


def _tp_fsdp(tensor: Tensor, rank: int, ranks: int) -> Chunk:
    """Tensor parallel within a host, and each part sharded by rows over the hosts."""
    hosts, host, place = ranks // RANKS_PER_HOST, rank // RANKS_PER_HOST, rank % RANKS_PER_HOST
    if tensor.cut == "whole":
        return _sharded(tensor, *_cut(tensor.size[0], hosts, host), replicated=True)
    if tensor.cut == "columns":
        start, rows = _cut(tensor.size[0], hosts, host)
        left, columns = _cut(tensor.size[1], RANKS_PER_HOST, place)
        return Chunk(True, False, (start, left), (rows, columns))
    first, part = _cut(tensor.size[0], RANKS_PER_HOST, place)
    start, rows = _cut(part, hosts, host)
    return _sharded(tensor, first + start if rows else tensor.size[0], rows, replicated=False)


def _replicated(tensor: Tensor, rank: int, ranks: int) -> Chunk:
    return _plain(tensor)


FSDP = Layout("fsdp", "FSDP", _fsdp)
ADAMW = Layout("adamw", "FSDP with AdamW's steps", _fsdp, steps=True)
HSDP = Layout("hsdp", "HSDP", _hsdp)
TP_FSDP = Layout("tp_fsdp", "TP x FSDP", _tp_fsdp)
REPLICATED = Layout("replicated", "replicated (DDP)", _replicated)
LAYOUTS = {layout.key: layout for layout in (FSDP, ADAMW, HSDP, TP_FSDP, REPLICATED)}


def chunk_bytes(lengths: Ints) -> int:
    return ITEM_BYTES * math.prod(lengths)
