"""load_pretrained: a model's weights from safetensors, whatever the model is wrapped in and wherever it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _distributed
import _wrappers
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcpring import (
    CheckpointError,
    CorruptCheckpointError,
    KeyMismatchError,
    RingWriter,
    load_pretrained,
    save_pretrained_weights,
)
from dcpring.state_dict import get_model_state_dict


class Net(nn.Module):
    """Tied weights, a buffer that is saved, and one that is not."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(35, width)
        self.up = nn.Linear(width, 48)
        self.down = nn.Linear(48, width, bias=False)
        self.head = nn.Linear(width, 35, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("steps", torch.arange(7), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(torch.relu(self.up(self.embedding(x))))) * self.scale + self.steps.sum()

    def reset_parameters(self) -> None:
        self.steps = torch.arange(7)


def net(seed: int = 7, device: str = "cpu") -> Net:
    torch.manual_seed(seed)
    with torch.device(device):
        return Net()


def weights() -> dict[str, Tensor]:
    model = net()
    with torch.no_grad():
        model.scale.fill_(3.0)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if name != "head.weight"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two files with an index, without the second name of the tied weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    state = weights()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    files = {name: names[number % 2] for number, name in enumerate(state)}
    for file in names:
        save_file({name: state[name] for name in state if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def whole(model: nn.Module) -> dict[str, Tensor]:
    state = get_model_state_dict(model)
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in state.items()}


def check(model: nn.Module) -> None:
    """What is in the model, and what it computes."""
    expected = weights()
    found = whole(model)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert torch.equal(found["head.weight"], expected["embedding.weight"])
    plain = net()
    with torch.no_grad():
        plain.scale.fill_(3.0)
    x = torch.arange(6)
    got = model(x)
    torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got, plain(x))


def sharded(device: str, policy: Any = None) -> nn.Module:
    model = net(device=device)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh} | ({"offload_policy": policy} if policy else {})
    fully_shard(model.up, **options)
    return fully_shard(model, **options)


def hybrid(device: str) -> nn.Module:
    return fully_shard(net(device=device), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))


def two_dimensions(device: str) -> nn.Module:
    model = net(device=device)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["shard"])


def parallel(device: str) -> nn.Module:
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(net(device=device), init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def compiled(device: str) -> nn.Module:
    return torch.compile(sharded(device), backend="eager")


MESHES: dict[str, Callable[[str], nn.Module]] = {
    "FSDP2": sharded,
    "HSDP": hybrid,
    "FSDP2 and TP": two_dimensions,
    "TP": parallel,
    "compiled": compiled,
}


def load_sharded(path: str, mesh: str, device: str) -> None:
    model = MESHES[mesh](device)
    diff = load_pretrained(model, path)
    assert not diff
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    check(model)


@pytest.mark.parametrize("device", ("meta", "cpu"))
@pytest.mark.parametrize("mesh", MESHES)
def test_sharded(path: Path, mesh: str, device: str) -> None:
    _distributed.run(4, load_sharded, str(path), mesh, device)


class Thrice(nn.Module):
    """A model that says, as those of transformers do, which names it ties."""

    def __init__(self) -> None:
        super().__init__()
        self.all_tied_weights_keys = {"head.weight": "embedding.weight", "tail.weight": "embedding.weight"}
        self.embedding = nn.Embedding(35, 24)
        self.head, self.tail = nn.Linear(24, 35, bias=False), nn.Linear(24, 35, bias=False)
        self.head.weight = self.tail.weight = self.embedding.weight


def load_untied(path: str, stored: str) -> None:
    with torch.device("meta"):
        model: Any = nn.ModuleDict({"part": Thrice()})
    plan: dict[str, Any] = {"part.embedding": RowwiseParallel(), "part.head": ColwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    part = model["part"]
    assert len({id(each.weight) for each in (part.embedding, part.head, part.tail)}) == 3
    if stored == "nothing":
        with pytest.raises(KeyMismatchError, match=r"(?s)missing.*\(3\).*embedding.weight.*head.weight.*tail.weight"):
            load_pretrained(model, path)
        return
    assert not load_pretrained(model, path)
    for name, tensor in whole(model).items():
        assert torch.equal(tensor, weights()["embedding.weight"]), name
    save_pretrained_weights(model, f"{path}/again")


@pytest.mark.parametrize("stored", ("embedding", "head", "nothing"))
def test_tied_weights_that_have_become_several(tmp_path: Path, stored: str) -> None:
    """Tensor parallelism makes parameters anew; each is read from the one that is stored, and saved."""
    save_file({f"part.{stored}.weight": weights()["embedding.weight"]}, tmp_path / "model.safetensors")
    _distributed.run(2, load_untied, str(tmp_path), stored)
    if stored != "nothing":
        found = load_file(tmp_path / "again" / "model.safetensors")
        assert found.keys() == {f"part.{name}.weight" for name in ("embedding", "head", "tail")}


def train_offloaded(path: str) -> None:
    model = sharded("meta", CPUOffloadPolicy(pin_memory=False))
    load_pretrained(model, path, device="cpu", share="host")
    check(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(6)).sum().backward()
    optimizer.step()
    after = whole(model)
    assert torch.equal(after["head.weight"], after["embedding.weight"])
    assert not torch.equal(after["up.weight"], weights()["up.weight"])


def test_training_goes_on(path: Path) -> None:
    _distributed.run(2, train_offloaded, str(path))


@pytest.mark.parametrize("device", ("meta", "cpu"))
def test_one_process(path: Path, device: str) -> None:
    model = net(1, device)
    assert not load_pretrained(model, path)
    assert model.head.weight is model.embedding.weight
    assert model.up.weight.requires_grad and isinstance(model.up.weight, nn.Parameter)
    check(model)


def test_a_part_on_meta(path: Path) -> None:
    """What is not on meta stays where it is."""
    model = net(1)
    model.up = nn.Linear(24, 48, device="meta")
    memory = model.down.weight.data_ptr()
    load_pretrained(model, path)
    assert model.down.weight.data_ptr() == memory
    check(model)


def test_a_checkpoint_of_dcp(tmp_path: Path) -> None:
    dcp.save(net().state_dict(), storage_writer=RingWriter(tmp_path), no_dist=True)
    model = net(1, "meta")
    assert not load_pretrained(model, tmp_path)
    assert torch.equal(model.up.weight, net().up.weight)


def load_wrapped(path: str, index: int) -> None:
    case = list(_wrappers.cases())[index]
    try:
        model = _wrappers.build(case, seed=1)
    except Exception:
        return  # torch cannot nest these
    allowed = [f"*{name}" for name in _wrappers.OWN]
    diff = load_pretrained(model, path, allow_missing=allowed)
    assert {item.key.rpartition(".")[2] for item in diff.missing} <= set(_wrappers.OWN) and not diff.unexpected, diff
    expected = _wrappers.Net().state_dict()
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    found = {name: tensor for name, tensor in full.items() if name in expected}
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.cpu(), expected[name]), name


SINGLE = [index for index, case in enumerate(_wrappers.cases()) if not case.outer]


@pytest.mark.parametrize("index", SINGLE, ids=[str(list(_wrappers.cases())[index]) for index in SINGLE])
def test_wrapped(tmp_path: Path, index: int) -> None:
    save_file(_wrappers.Net().state_dict(), tmp_path / "model.safetensors")
    _distributed.run(2, load_wrapped, str(tmp_path), index)


# ---- what does not fit ----


def test_what_is_missing_or_left_over(path: Path) -> None:
    model = net(1)
    model.extra = nn.Linear(3, 3)
    model.register_parameter("up_", model.up.weight)
    del model.up
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(KeyMismatchError, match=r"does not fit the model:") as caught:
        load_pretrained(model, path)
    assert "'up_', 'extra.weight', 'extra.bias'" in str(caught.value)
    assert "'up.weight', 'up.bias'" in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    diff = load_pretrained(model, path, allow_missing=["extra.*", "up_"])
    assert [item.key for item in diff.missing] == ["up_", "extra.weight", "extra.bias"]
    assert {item.key for item in diff.unexpected} == {"up.bias", "up.weight"}
    assert torch.equal(model.down.weight, weights()["down.weight"])
    with pytest.raises(KeyMismatchError, match=r"up\.bias"):
        load_pretrained(model, path, missing="allow", unexpected="error")


def test_shapes_and_names(path: Path) -> None:
    with pytest.raises(KeyMismatchError, match=r"'up\.weight': the state dict has \[48, 16\].*\[48, 24\]"):
        load_pretrained(Net(16), path)
    inner = net(1, "meta")
    model = nn.Sequential(inner)
    assert not load_pretrained(model, path, key_map={"prefixes": {"": "0."}})
    check(inner)


def test_casts_are_told(path: Path) -> None:
    model = net(1).double()
    diff = load_pretrained(model, path)
    assert {item.key for item in diff.dtypes} >= {"up.weight", "down.weight"}
    assert torch.equal(model.up.weight, weights()["up.weight"].double())


def test_a_state_dict_is_no_model(path: Path) -> None:
    state: Any = net().state_dict()
    with pytest.raises(TypeError, match=r"this is a OrderedDict; dcp\.load and RingHFReader load a state dict"):
        load_pretrained(state, path)
    with pytest.raises(TypeError, match=r"this is a OrderedDict; dcp\.save and RingHFWriter save a state dict"):
        save_pretrained_weights(state, path)


def test_a_name_on_a_hub(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"org/model does not exist; what is on a hub.*snapshot_download"):
        load_pretrained(net(), "org/model")


# ---- quantised weights ----


def quantised(folder: Path) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 120, (200, 300)).to(torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.rand(2, 3)
    save_file({"up.weight": codes, "up.weight_scale_inv": scales}, folder / "model.safetensors")
    return codes, scales


def scaled(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(300, 200, bias=False)


def test_quantised_weights(tmp_path: Path) -> None:
    codes, scales = quantised(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.device("meta"):
            model = Up().to(dtype)
        diff = load_pretrained(model, tmp_path, device="cpu", unexpected="error")
        assert torch.equal(model.up.weight, scaled(codes, scales).to(dtype))
        assert not diff.missing and not diff.unexpected


def test_float8_without_its_scales(tmp_path: Path) -> None:
    """What a cast would give may have been scaled, in a way that is not known here."""
    codes, _ = quantised(tmp_path)
    save_file({"up": codes, "up_scale": torch.ones(200)}, tmp_path / "model.safetensors")
    model = nn.ParameterDict({"up": torch.zeros(200, 300)})
    with pytest.raises(CheckpointError, match=r"'up' in float8, and no '_scale_inv' of theirs.*'dequantize': None"):
        load_pretrained(model, tmp_path)
    assert not model["up"].any()
    load_pretrained(model, tmp_path, reader_options={"dequantize": None})
    assert torch.equal(model["up"], codes.float())


def test_a_model_that_is_quantised_itself(tmp_path: Path) -> None:
    codes, scales = quantised(tmp_path)
    model = Up()
    model.up.weight = nn.Parameter(torch.zeros(200, 300).to(codes.dtype), requires_grad=False)
    model.up.register_buffer("weight_scale_inv", torch.zeros(2, 3))
    load_pretrained(model, tmp_path)
    assert torch.equal(model.up.weight.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(model.up.weight_scale_inv, scales)


# ---- first values of what no file has ----


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def test_nothing_gives_values(tmp_path: Path) -> None:
    save_file({"0.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(Strange())
    with pytest.raises(CheckpointError, match=r"'0\.table' of the model are on meta.*pass initialize="):
        load_pretrained(model, tmp_path)
    assert model[0].weight.is_meta

    def initialize(module: Any) -> None:
        module.table.copy_(torch.arange(3.0))

    load_pretrained(model, tmp_path, initialize=initialize)
    assert model[0].table.tolist() == [0, 1, 2] and model[0].weight.tolist() == [1, 1, 1]


class Part(nn.Module):
    """A model that may be a part of another, and knows the first values of its own modules only."""

    def __init__(self, number: float, part: nn.Module | None = None) -> None:
        super().__init__()
        self.number, self.inner, self.part = number, Strange(), part

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Strange):
            module.table.fill_(self.number)


def test_parts_give_their_own_values(tmp_path: Path) -> None:
    save_file({"inner.weight": torch.ones(3), "part.inner.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model: Any = Part(1.0, Part(2.0))
    load_pretrained(model, tmp_path)
    assert model.inner.table.tolist() == [1, 1, 1] and model.part.inner.table.tolist() == [2, 2, 2]


def test_first_values_that_fail(tmp_path: Path) -> None:
    """As a formula of the model's own that takes no DTensor."""
    save_file({"inner.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Part(torch.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"cannot give a Strange its first values: \w+: .*; pass initialize="):
        load_pretrained(model, tmp_path)
    load_pretrained(model, tmp_path, initialize=lambda module: None)
    assert model.inner.weight.tolist() == [1, 1, 1]


def test_a_new_head(path: Path) -> None:
    with torch.device("meta"):
        model = Net()
        model.score = nn.Linear(24, 2)
    torch.manual_seed(0)
    diff = load_pretrained(model, path, allow_missing=["score.*"])
    assert [item.key for item in diff.missing] == ["score.weight", "score.bias"]
    assert 0 < model.score.weight.abs().max() <= 24**-0.5
    check(model)


# ---- ranks that fail ----


def fail(path: str, kind: str) -> str:
    model = sharded("meta" if kind == "meta" else "cpu")
    before = {name: one.clone() for name, one in whole(model).items()} if kind != "meta" else {}
    if kind == "one rank" and dist.get_rank() == 1:
        path += "-elsewhere"
    try:
        load_pretrained(model, path, **({"allow_missing": [1]} if kind == "arguments" else {}))
    except Exception as error:
        assert all(torch.equal(one, before[name]) for name, one in whole(model).items() if before)
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_ranks_fail_alike(path: Path) -> None:
    texts = _distributed.run(2, fail, str(path), "one rank")
    assert texts[0] == texts[1] and "rank 1" in texts[0] and "-elsewhere" in texts[0]
    state = weights()
    del state["up.weight"]
    (path / "model.safetensors.index.json").unlink()
    for file in path.iterdir():
        file.unlink()
    save_file(state, path / "model.safetensors")
    texts = _distributed.run(2, fail, str(path), "meta")
    assert texts[0] == texts[1] and texts[0].startswith("KeyMismatchError") and "'up.weight'" in texts[0]
    (path / "model.safetensors").write_bytes(b"no")
    texts = _distributed.run(2, fail, str(path), "damaged")
    assert texts[0] == texts[1] and texts[0].startswith(CorruptCheckpointError.__name__)


# ---- and back ----


def save_sharded(path: str, mesh: str) -> None:
    model = MESHES[mesh]("cpu")
    load_pretrained(model, f"{path}/model")
    save_pretrained_weights(model, f"{path}/again")


@pytest.mark.parametrize("mesh", MESHES)
def test_saved_from_shards(path: Path, mesh: str) -> None:
    """What is written is what was read, with the tied weights once."""
    _distributed.run(4, save_sharded, str(path.parent), mesh)
    found = load_file(path.parent / "again" / "model.safetensors")
    expected = weights()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def save_wrapped(path: str, index: int) -> list[str]:
    case = list(_wrappers.cases())[index]
    try:
        model = _wrappers.build(case, seed=1)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    except Exception:
        return []  # torch cannot nest these, or there are no names for them (test_state_dict)
    save_pretrained_weights(model, path)
    if dist.get_rank() != 0:
        return []
    found = load_file(f"{path}/model.safetensors")
    wrong = [name for name in full.keys() ^ found.keys() if isinstance(full.get(name), Tensor)]
    return wrong + [name for name in found if not torch.equal(_wrappers.full_tensor(full[name]), found[name])]


@pytest.mark.slow(but=[str(index) for index in range(0, len(list(_wrappers.cases())), 11)])
@pytest.mark.parametrize("index", range(len(list(_wrappers.cases()))))
def test_saved_from_every_wrapping(tmp_path: Path, index: int) -> None:
    assert _distributed.run(2, save_wrapped, str(tmp_path), index) == [[], []]


def test_saved_by_one_process(path: Path) -> None:
    model = net(1)
    load_pretrained(model, path)
    save_pretrained_weights(model, path, dtype=torch.bfloat16)
    found, expected = load_file(path / "model.safetensors"), weights()
    assert all(torch.equal(found[name], one.bfloat16()) for name, one in expected.items())
    assert [one.name for one in path.iterdir()] == ["model.safetensors"]
