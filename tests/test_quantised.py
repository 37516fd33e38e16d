"""RingQuantizedHFReader against torch's reader, bit for bit, on whole tensors, slices and shards; and what is wrong."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _distributed
import _kinds
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from test_elements import assert_same_bits
from test_hf_reader import INDEX, PLANNERS, load
from torch import Tensor
from torch.distributed.checkpoint import QuantizedHuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcpring
from dcpring import (
    _C,
    CheckpointError,
    CorruptCheckpointError,
    KeyMismatchError,
    RingHFReader,
    RingLoadPlanner,
    RingQuantizedHFReader,
    RingReader,
)
from dcpring.format.safetensors import CRCS, SHARDING, make_header
from dcpring.move.load.task import Inputs
from dcpring.options import IOOptions

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def float8(rows: int, columns: int, dtype: torch.dtype, scale: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """All codes, those of NaN and infinities too, and scales from 0 to infinity."""
    made = torch.Generator().manual_seed(rows * columns)
    codes = torch.randint(0, 256, (rows, columns), generator=made).to(torch.uint8).view(dtype)
    blocks = -(-rows // 128), -(-columns // 128)
    scales = torch.randn(blocks, generator=made) * 2.0 ** torch.randint(-20, 20, blocks, generator=made)
    for place, value in enumerate((0.0, -0.0, float("inf"), float("nan"), 1e38, 1e-38)):
        if scales.numel() > 4 * place:
            scales.view(-1)[4 * place] = value
    return codes, scales.to(scale)


def mxfp4(*shape: int) -> tuple[Tensor, Tensor]:
    """All codes, and all exponents."""
    made = torch.Generator().manual_seed(sum(shape))
    codes = torch.randint(0, 256, shape, generator=made).to(torch.uint8)
    scales = torch.arange(shape[0] * shape[1] * shape[2]).add(100).to(torch.uint8).view(shape[:-1])
    return codes, scales


def tensors() -> dict[str, Tensor]:
    state = {}
    for number, dtype in enumerate(FLOAT8):
        name = f"layers.{number}.weight"
        state[name], state[name + "_scale_inv"] = float8(300 + number, 515, dtype)
    state["thin.weight"], state["thin.weight_scale_inv"] = float8(1, 129, torch.float8_e4m3fn)
    state["halves.weight"], state["halves.weight_scale_inv"] = float8(128, 256, FLOAT8[0], torch.bfloat16)
    state["doubles.weight"], state["doubles.weight_scale_inv"] = float8(130, 2, FLOAT8[0], torch.float64)
    state["experts.up_blocks"], state["experts.up_scales"] = mxfp4(3, 37, 6, 16)
    state["experts.odd_blocks"], state["experts.odd_scales"] = mxfp4(2, 5, 7, 3)
    state["norm.weight"] = torch.randn(65, generator=torch.Generator().manual_seed(1)).bfloat16()
    state["bias_scales"] = torch.ones(3)
    return state


def write(path: Path, state: dict[str, Tensor], files: int = 2) -> Path:
    """A model whose scales are in other files than what they scale."""
    path.mkdir()
    names = [f"model-{number + 1:05}-of-{files:05}.safetensors" for number in range(files)]
    where = {name: names[number % files] for number, name in enumerate(state)}
    for file in names:
        save_file({name: state[name] for name in state if where[name] == file}, path / file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


Box = tuple[tuple[int, ...], tuple[int, ...]]


def grid(shape: tuple[int, ...], begins: list[list[int]]) -> list[Box]:
    """Boxes that make up a tensor, of which each begins at one of these places along each dimension."""
    ends = [[*starts[1:], size] for starts, size in zip(begins, shape, strict=True)]
    ranges = itertools.product(*(zip(*pair, strict=True) for pair in zip(begins, ends, strict=True)))
    return [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in ranges]


def write_shards(
    path: Path, state: dict[str, Tensor], parts: dict[str, list[Box]], rank: Callable[[], int], count: int = 4
) -> Path:
    """As HuggingFaceStorageWriter(save_distributed=True) leaves it; ``rank`` says whose each part is."""
    path.mkdir()
    owned: dict[int, dict[str, Box]] = {number: {} for number in range(count)}
    for name, boxes in parts.items():
        for box in boxes:
            number = next(number for number in itertools.count(rank()) if name not in owned.setdefault(number, {}))
            owned[number][name] = box
    for number, held in owned.items():
        note = {SHARDING: json.dumps({name: {"saved_offsets": box[0]} for name, box in held.items()})}
        cut = {
            name: state[name][tuple(slice(a, a + n) for a, n in zip(*box, strict=True))] for name, box in held.items()
        }
        file = path / f"shard-{number + 1:05}-model-00001-of-00001.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in cut.items()}, file, note)
    return path


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Codes and scales are each cut in their own way, and shared out by chance."""
    chance, state = random.Random(8), tensors()
    parts = {}
    for name, tensor in state.items():
        cuts = [sorted({0, *(chance.randrange(size) for _ in range(2))}) for size in tensor.shape]
        parts[name] = grid(tensor.shape, cuts)
    return write_shards(tmp_path_factory.mktemp("shards") / "model", state, parts, lambda: chance.randrange(4))


STORED = ("model", "shards")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("quantised") / "model", tensors())


def wanted(dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors for all that is quantised, as it is when it is not."""
    state: dict[str, Tensor] = {}
    for name, stored in tensors().items():
        if name.endswith("_blocks"):
            state[name] = torch.full((*stored.shape[:-2], stored.shape[-2] * stored.shape[-1] * 2), 7, dtype=dtype)
        elif "scale" not in name and name != "norm.weight":
            state[name] = torch.full(stored.shape, 7, dtype=dtype)
    return state


def by_torch(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What torch's reader makes of MXFP4; with DCP's planner it fills but a few columns of the tensor.

    It does so by torch.ldexp in ``dtype``, which torch 2.9 works out by way of infinite factors.
    """
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    made = torch.stack([values[codes.long() & 15], values[codes.long() >> 4]], -1).flatten(-2)
    return torch.ldexp(made, scales.to(torch.int32).unsqueeze(-1) - 127).to(dtype).flatten(-2)


@functools.cache
def expected(model: Path, dtype: torch.dtype, into: torch.dtype) -> dict[str, Tensor]:
    state, stored = wanted(into), tensors()
    float8s = {name: tensor for name, tensor in state.items() if not name.endswith("_blocks")}
    load(float8s, QuantizedHuggingFaceStorageReader(str(model), target_dtype=dtype))
    for name in state.keys() - float8s.keys():
        state[name] = by_torch(stored[name], stored[name.replace("_blocks", "_scales")], dtype).to(into)
    return state


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("into", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_tensors(
    request: pytest.FixtureRequest, model: Path, dtype: torch.dtype, into: torch.dtype, planner: str, stored: str
) -> None:
    state, path = wanted(into), request.getfixturevalue(stored)
    load(state, RingQuantizedHFReader(str(path), target_dtype=dtype, casts="any"), PLANNERS[planner]())
    for name, tensor in expected(model, dtype, into).items():
        assert_same_bits(state[name], tensor)


def test_any_reader_dequantises_if_told(model: Path) -> None:
    whole = expected(model, torch.float32, torch.float32)
    for kind in (RingReader, RingHFReader):
        state = {"layers.0.weight": torch.zeros(300, 515)}
        load(state, kind(str(model), dequantize=torch.float32))
        assert_same_bits(state["layers.0.weight"], whole["layers.0.weight"])
        with pytest.raises(ValueError, match="dequantize"):
            kind(str(model), dequantize=torch.float64)


def test_the_metadata_tells_what_is_made(model: Path) -> None:
    entries = RingQuantizedHFReader(str(model), target_dtype=torch.bfloat16).read_metadata().state_dict_metadata
    assert entries["experts.up_blocks"].size == torch.Size((3, 37, 192))
    assert entries["layers.0.weight"].size == torch.Size((300, 515))
    dtypes = {name: entry.properties.dtype for name, entry in entries.items()}
    assert all(dtypes[name] == torch.bfloat16 for name in wanted(torch.bfloat16))
    assert dtypes["layers.0.weight_scale_inv"] == torch.float32 and dtypes["experts.up_scales"] == torch.uint8
    stored = RingHFReader(str(model)).read_metadata().state_dict_metadata
    assert stored["layers.0.weight"].properties.dtype == FLOAT8[0]


@pytest.mark.parametrize("planner", PLANNERS)
def test_what_is_not_quantised_and_scales_too(model: Path, planner: str) -> None:
    names = ("norm.weight", "bias_scales", "layers.1.weight_scale_inv", "experts.up_scales")
    state = {name: torch.zeros_like(tensors()[name]) for name in names}
    load(state, RingQuantizedHFReader(str(model)), PLANNERS[planner]())
    _kinds.assert_same_bits(state, {name: tensors()[name] for name in names})


def test_scales_are_not_unexpected(tmp_path: Path) -> None:
    codes, scales = float8(64, 64, FLOAT8[0])
    path = write(tmp_path / "model", {"x.weight": codes, "x.weight_scale_inv": scales, "y": torch.ones(1)})
    for planner in (dcp.DefaultLoadPlanner(), RingLoadPlanner(unexpected="error")):
        reader = RingQuantizedHFReader(str(path), unexpected="error")
        with pytest.raises(KeyMismatchError, match=r"unexpected in the checkpoint \(1\): 'y'"):
            load({"x.weight": torch.zeros(64, 64)}, reader, planner)


# ---- slices ----


class Boxes(dcp.DefaultLoadPlanner):
    """Wants these boxes of tensors, each in a tensor of its own."""

    def __init__(self, boxes: dict[str, list[tuple[tuple[int, ...], Tensor]]]) -> None:
        super().__init__()
        self.boxes = boxes

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, boxes in self.boxes.items():
            for number, (offsets, tensor) in enumerate(boxes):
                items.append(
                    ReadItem(
                        LoadItemType.TENSOR,
                        *(MetadataIndex(f"{name}/{number}"), torch.Size((0,) * tensor.ndim)),
                        *(MetadataIndex(name, torch.Size((0,) * tensor.ndim)), torch.Size(offsets), tensor.shape),
                    )
                )
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        name, number = index.fqn.rsplit("/", 1)
        return self.boxes[name][int(number)][1]


def random_boxes(shape: torch.Size, dtype: torch.dtype, made: random.Random) -> list[tuple[tuple[int, ...], Tensor]]:
    """Of all sizes, none among them, and of all layouts of memory."""
    boxes = []
    for number in range(16):
        ranges = [sorted(made.choices(range(size + 1), k=2)) for size in shape]
        lengths = [end - begin for begin, end in ranges]
        tensor = torch.full(lengths, 7, dtype=dtype)
        if number % 4 == 1:
            tensor = torch.full([2 * length for length in lengths], 7, dtype=dtype)[tuple(map(slice, lengths))]
        elif number % 4 == 2:
            tensor = torch.full(lengths[::-1], 7, dtype=dtype).permute(*range(len(shape))[::-1])
        boxes.append((tuple(begin for begin, _ in ranges), tensor))
    return boxes


@pytest.mark.parametrize("into", DTYPES)
@pytest.mark.parametrize("window_bytes", (5000, 32 << 20))
def test_any_box(model: Path, into: torch.dtype, window_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where host copies are cut into small windows."""
    monkeypatch.setattr("dcpring.move.device.HOST_BYTES", window_bytes)
    for dtype in (torch.float32, torch.bfloat16):
        whole = expected(model, dtype, into)
        made = random.Random(window_bytes)
        boxes = {name: random_boxes(tensor.shape, into, made) for name, tensor in whole.items()}
        planner = Boxes(boxes)
        load({}, RingQuantizedHFReader(str(model), target_dtype=dtype, casts="any", workers=3), planner)
        for name, each in boxes.items():
            for offsets, tensor in each:
                part = tuple(slice(begin, begin + size) for begin, size in zip(offsets, tensor.shape, strict=True))
                assert_same_bits(tensor.contiguous(), whole[name][part].contiguous())


def test_shards_in_small_windows(model: Path, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcpring.move.device.HOST_BYTES", 5000)
    for into in (torch.float32, torch.bfloat16):
        state = wanted(into)
        load(state, RingQuantizedHFReader(str(shards), target_dtype=torch.float32, casts="any"), RingLoadPlanner())
        for name, tensor in expected(model, torch.float32, into).items():
            assert_same_bits(state[name], tensor)


def load_placed(path: str, planner: str) -> dict[str, Tensor]:
    """Sharded along each dimension, unevenly, and on a mesh of two dimensions."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    layouts = ([Shard(0), Replicate()], [Shard(1), Replicate()], [Shard(1), Shard(0)], [Replicate(), Shard(0)])
    state: dict[str, Any] = {}
    for number, (name, tensor) in enumerate(wanted(torch.bfloat16).items()):
        state[name] = distribute_tensor(tensor, mesh, layouts[number % len(layouts)])
    options = {"process_group": dist.group.WORLD, "share": "host"} if planner == "ring" else {}
    dcp.load(state, storage_reader=RingQuantizedHFReader(path), planner=PLANNERS[planner](**options))
    return {name: tensor.full_tensor() for name, tensor in state.items() if isinstance(tensor, DTensor)}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("planner", PLANNERS)
def test_sharded(request: pytest.FixtureRequest, model: Path, planner: str, stored: str) -> None:
    whole = expected(model, torch.float32, torch.bfloat16)
    for got in _distributed.run(4, load_placed, str(request.getfixturevalue(stored)), planner):
        assert got.keys() == whole.keys()
        for name, tensor in got.items():
            assert_same_bits(tensor, whole[name])


def test_only_what_a_slice_needs_is_read(tmp_path: Path) -> None:
    codes, scales = float8(4096, 4096, FLOAT8[0])
    path = write(tmp_path / "model", {"x.weight": codes, "x.weight_scale_inv": scales})
    tensor = torch.zeros(1024, 4096)
    reader = RingQuantizedHFReader(str(path))
    load({}, reader, Boxes({"x.weight": [((1024, 0), tensor)]}))
    assert reader.stats is not None and reader.stats.bytes < 1.1 * tensor.numel()


def load_cold(path: str, placement: Any, share: Any) -> bool:
    if dist.get_rank() == 0:
        for file in Path(path).glob("*.safetensors"):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()
    placements = placement if isinstance(placement, list) else [placement]
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2)[-len(placements) :])
    state = {"x.weight": distribute_tensor(torch.zeros(1024, 512), mesh, placements)}
    reader = RingQuantizedHFReader(path)
    dcp.load(state, storage_reader=reader, planner=RingLoadPlanner(process_group=dist.group.WORLD, share=share))
    assert reader.stats is not None
    return reader.stats.direct


@pytest.mark.parametrize(
    "placement, share, is_direct",
    (
        (Shard(0), "off", True),
        (Shard(0), "host", True),
        (Shard(1), "off", False),
        (Replicate(), "off", True),
        (Replicate(), "host", False),
        ([Replicate(), Shard(0)], "off", True),
        ([Replicate(), Shard(0)], "host", False),
    ),
)
def test_what_others_want_comes_through_the_page_cache(
    tmp_path: Path, placement: Any, share: str, is_direct: bool
) -> None:
    """What lies between columns, and where ranks share what each wants whole, or what is replicated."""
    codes, scales = float8(1024, 512, FLOAT8[0])
    path = write(tmp_path / "model", {"x.weight": codes, "x.weight_scale_inv": scales}, 1)
    ranks = 4 if isinstance(placement, list) else 2
    assert any(_distributed.run(ranks, load_cold, str(path), placement, share)) == is_direct


# ---- a scale for all, other block sizes, several names, stacks ----


def load_stacked(path: str) -> Tensor:
    """Cut along each dimension."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for dim in range(3):
        state = {"up": distribute_tensor(torch.zeros(3, 200, 300, dtype=torch.bfloat16), mesh, [Shard(dim)])}
        dcp.load(state, storage_reader=RingQuantizedHFReader(path), planner=RingLoadPlanner())
        found.append(state["up"].full_tensor())
    for one in found[1:]:
        assert_same_bits(one, found[0])
    return found[0]


@pytest.mark.parametrize("stored", STORED)
def test_stacked_matrices(tmp_path: Path, stored: str) -> None:
    """As transformers has fused experts: of any name, with a block of factors for each."""
    matrices = [float8(200, 300, FLOAT8[0]) for _ in range(3)]
    codes = torch.stack([one.view(torch.uint8).roll(number) for number, (one, _) in enumerate(matrices)])
    state = {"up": codes.view(FLOAT8[0]), "up_scale_inv": torch.stack([scale.flip(0) for _, scale in matrices])}
    if stored == "model":
        path = write(tmp_path / "model", state)
    else:
        parts = {
            "up": grid(codes.shape, [[0, 2], [0, 71], [0, 130, 131]]),
            "up_scale_inv": grid((3, 2, 3), [[0], [0, 1], [0]]),
        }
        path = write_shards(tmp_path / "model", state, parts, lambda: 0)
    factors = state["up_scale_inv"].repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :200, :300]
    whole = (state["up"].float() * factors).bfloat16()
    for found in _distributed.run(2, load_stacked, str(path)):
        assert_same_bits(found, whole)
    for planner in PLANNERS.values():
        got = {"up": torch.zeros(3, 200, 300, dtype=torch.bfloat16)}
        load(got, RingQuantizedHFReader(str(path)), planner())
        assert_same_bits(got["up"], whole)


def test_other_blocks(tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 120, (70, 50), generator=made).to(torch.uint8).view(FLOAT8[0])
    blocks = torch.randn(5, 4, generator=made)
    one = torch.tensor(0.3)
    path = write(tmp_path / "blocks", {"x.weight": codes, "x.weight_scale_inv": blocks})
    state = {"x.weight": torch.zeros(70, 50)}
    load(state, RingQuantizedHFReader(str(path), block_size=16))
    full = blocks.repeat_interleave(16, 0).repeat_interleave(16, 1)[:70, :50]
    assert torch.equal(state["x.weight"], codes.float() * full)
    for number, scale in enumerate((one, one.view(1), one.view(1, 1))):
        path = write(tmp_path / f"{number}", {"x.weight": codes, "x.weight_scale_inv": scale})
        load(state, RingQuantizedHFReader(str(path), block_size=16))
        assert torch.equal(state["x.weight"], codes.float() * one)


def test_key_maps_and_tied_names(tmp_path: Path) -> None:
    codes, scales = float8(64, 64, FLOAT8[0])
    path = tmp_path / "model"
    path.mkdir()
    save_file({"x.weight": codes, "x.weight_scale_inv": scales}, path / "model.safetensors", {"y.weight": "x.weight"})
    got = {"y.weight": torch.zeros(64, 64), "z": torch.zeros(64, 64)}
    for planner in PLANNERS.values():
        load(got, RingQuantizedHFReader(str(path), key_map={"x.weight": "z"}), planner())
        assert_same_bits(got["y.weight"], got["z"])
        assert_same_bits(got["z"], codes.float() * scales)


def test_installed(model: Path) -> None:
    state = {"experts.up_blocks": wanted(torch.float32)["experts.up_blocks"]}
    with dcpring.install():
        reader = QuantizedHuggingFaceStorageReader(str(model), 4, target_dtype=torch.bfloat16, block_size=128)
        assert type(reader) is RingQuantizedHFReader and reader.target_dtype == torch.bfloat16
        load(state, reader)
    whole = expected(model, torch.bfloat16, torch.float32)
    assert_same_bits(state["experts.up_blocks"], whole["experts.up_blocks"])


# ---- what is wrong ----


def test_what_cannot_be_made(model: Path) -> None:
    for options, said in (({"target_dtype": torch.int8}, "dequantize"), ({"block_size": 0}, "block_size")):
        with pytest.raises(ValueError, match=said):
            RingQuantizedHFReader(str(model), **options)
    state = {"layers.0.weight": torch.zeros(300, 515, dtype=torch.float16)}
    for casts, into in (("never", torch.bfloat16), ("round", torch.int32)):
        state = {"layers.0.weight": torch.zeros(300, 515, dtype=into)}
        with pytest.raises(CheckpointError, match=r"layers.0.weight.*the checkpoint has torch.float32"):
            load(state, RingQuantizedHFReader(str(model), casts=casts))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"x.weight": torch.zeros(130, 5).to(FLOAT8[0])}, r"'x.weight' is torch.float8_e4m3fn, and there is no 'x"),
        (
            {"x.weight": torch.zeros(130, 5).to(FLOAT8[0]), "x.weight_scale_inv": torch.zeros(3, 1)},
            r"'x.weight_scale_inv' cannot be the scales of 'x.weight': their shape is \[3, 1\].*need \[2, 1\]",
        ),
        (
            {"x.weight": torch.zeros(130, 5, 5).to(FLOAT8[0]), "x.weight_scale_inv": torch.zeros(2, 1)},
            r"need \[130, 1, 1\]",
        ),
        ({"x.weight": torch.zeros(5).to(FLOAT8[0]), "x.weight_scale_inv": torch.zeros(1)}, "a matrix, or a stack"),
        (
            {"x": torch.zeros(2, 5, 5).to(FLOAT8[0]), "x_scale_inv": torch.ones(1)},
            r"one for all of \[2, 5, 5\], and a stack needs",
        ),
        ({"x.weight": torch.zeros(130, 5), "x.weight_scale_inv": torch.zeros(2, 1)}, "torch.float32 and torch.float32"),
        (
            {"x_blocks": torch.zeros(3, 4, 16, dtype=torch.uint8), "x_scales": torch.zeros(4, 3, dtype=torch.uint8)},
            r"\[3, 4, 16\] and \[4, 3\]",
        ),
        ({"x_blocks": torch.zeros(3, 4, 16, dtype=torch.uint8), "x_scales": torch.zeros(3, 4)}, "both must be uint8"),
    ],
)
def test_scales_that_do_not_fit(tmp_path: Path, given: dict[str, Tensor], said: str) -> None:
    path = write(tmp_path / "model", given, files=len(given))
    with pytest.raises(CorruptCheckpointError, match=said) as caught:
        RingQuantizedHFReader(str(path)).read_metadata()
    assert caught.value.path == str(path / f"model-{len(given):05}-of-{len(given):05}.safetensors")


def test_damage_is_said_with_key_and_file(tmp_path: Path) -> None:
    """Of codes and of scales, where the files have CRCs."""
    codes, scales = float8(300, 300, FLOAT8[0])
    for name, tensor in (("x.weight", codes), ("x.weight_scale_inv", scales)):
        path = write(tmp_path / name, {"x.weight": codes, "x.weight_scale_inv": scales})
        file = path / ("model-00001-of-00002.safetensors" if tensor is codes else "model-00002-of-00002.safetensors")
        note = {CRCS: json.dumps({name: "00000000"})}
        header = make_header([(name, tensor.dtype, tensor.shape)], note)
        file.write_bytes(header + tensor.view(torch.uint8).numpy().tobytes())
        for planner in PLANNERS.values():
            with pytest.raises(CorruptCheckpointError, match=r"'x.weight'.*CRC") as caught:
                load({"x.weight": torch.zeros(300, 300)}, RingQuantizedHFReader(str(path)), planner())
            assert caught.value.path == str(file)
            assert "already overwritten" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        *((0, name) for name in ("float32", "int8", "nothing")),
        *((1, first) for first in (-1, 1, 2)),
        *((place, size) for place in (2, 3) for size in (-1, 0, 1)),
        *((place, skipped) for place in (4, 5) for skipped in (-1, 127, 128)),
        *((6, number) for number in (-1, 1, 1 << 40)),
    ],
)
def test_the_core_takes_only_what_fits(tmp_path: Path, change: int, value: Any) -> None:
    (tmp_path / "codes").write_bytes(bytes(range(100)))
    inputs = Inputs(str(tmp_path), ["codes"])
    how: list[Any] = ["float8_e4m3fn", 0, 128, 128, 0, 0, 0]
    where = (0, 0, 100, None, None, (10, 10), (2, 0), (5, 10))
    tensor, scales, options = torch.zeros(5, 10), torch.ones(1), IOOptions().for_core(False)
    _C.load(inputs.core, [(*where, tuple(how))], [tensor], options, [scales])
    assert torch.equal(tensor, torch.arange(20, 70).to(torch.uint8).view(FLOAT8[0]).float().view(5, 10))
    how[change] = value
    with pytest.raises((ValueError, OverflowError), match="do not fit each other"):
        _C.load(inputs.core, [(*where, tuple(how))], [tensor], options, [scales])


def test_the_core_takes_only_tensors_that_fit(tmp_path: Path) -> None:
    (tmp_path / "codes").write_bytes(bytes(range(100)))
    inputs = Inputs(str(tmp_path), ["codes"])
    read = (0, 0, 100, None, None, (10, 10), (2, 0), (5, 10), ("float8_e4m3fn", 0, 128, 128, 0, 0, 0))
    options = IOOptions().for_core(False)
    one = torch.ones(1)
    for tensor, scales in (
        *((torch.zeros(*shape), one) for shape in ((5, 9), (5, 11), (4, 10), (10, 5))),
        (torch.zeros(10, 5).T, one),
        *((torch.zeros(5, 10, dtype=dtype), one) for dtype in (torch.float64, torch.int8)),
        *((torch.zeros(5, 10), scale) for scale in (torch.ones(2), torch.ones(0), one.double(), one.expand(3)[::2])),
    ):
        with pytest.raises(ValueError, match="do not fit each other"):
            _C.load(inputs.core, [read], [tensor], options, [scales])
    for scales in ([], [one.to("meta")]):
        with pytest.raises(ValueError, match="do not fit each other"):
            _C.load(inputs.core, [read], [torch.zeros(5, 10)], options, scales)


def test_shapes_that_no_tensor_has(tmp_path: Path) -> None:
    shape = [0, 1 << 61, 1 << 61]
    entries = {
        "x_blocks": {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]},
        "x_scales": {"dtype": "U8", "shape": shape[:-1], "data_offsets": [0, 0]},
    }
    header = json.dumps(entries).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CorruptCheckpointError):
        RingQuantizedHFReader(str(tmp_path)).read_metadata()
