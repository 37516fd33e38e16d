"""Rearranged state dicts: what is fused, stacked or transposed in the model, and not in the files, or the reverse."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcpring import (
    CheckpointError,
    KeyMismatchError,
    Rearrange,
    RingHFReader,
    RingHFWriter,
    RingLoadPlanner,
    RingReader,
    RingSavePlanner,
    RingWriter,
    load_pretrained,
    rearranged,
    save_pretrained_weights,
)
from dcpring.move.staging import StagingBuffer
from dcpring.torchside.composed import Composed

QKV = Rearrange("{m}.qkv.weight", "{m}.{p}_proj.weight", "(p o) i -> o i", {"p": {"q": 4, "k": 1, "v": 1}})
EXPERTS = Rearrange("{m}.gate_up", "{m}.{e}.{p}_proj.weight", "e h (p i) -> i h", {"p": ["gate", "up"]})
ROPE = Rearrange("{m}.wq", "{m}.q_proj", "(n d two) h -> (n two d) h", {"n": 4, "two": 2})
GROUPS = Rearrange("{m}.fused", "{m}.{p}", "(g p d) h -> (g d) h", {"g": 3, "p": {"q": 2, "k": 1, "v": 1}})
TURNED = Rearrange("{m}.conv", "{m}.conv", "i o -> o i")
RULES = [QKV, EXPERTS, ROPE, GROUPS, TURNED]


def model_tensors() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {
        "a.0.qkv.weight": torch.randn(6 * 7, 10),
        "a.1.qkv.weight": torch.randn(6 * 5, 10),
        "a.0.experts.gate_up": torch.randn(5, 9, 2 * 6),
        "a.0.wq": torch.randn(4 * 6 * 2, 11).to(torch.bfloat16),
        "a.0.fused": torch.randn(3 * 4 * 3, 7),
        "a.0.conv": torch.arange(8 * 6).view(8, 6),
        "a.0.bias": torch.randn(13),
    }


def stored_tensors() -> dict[str, Tensor]:
    """The same by operations of torch, as adapters of trainers do it."""
    state, made = model_tensors(), {}
    for layer, size in (("a.0", 7), ("a.1", 5)):
        parts = state[f"{layer}.qkv.weight"].split([4 * size, size, size])
        made |= {f"{layer}.{name}_proj.weight": part for name, part in zip("qkv", parts, strict=True)}
    for expert, weight in enumerate(state["a.0.experts.gate_up"]):
        for name, part in zip(("gate", "up"), weight.chunk(2, 1), strict=True):
            made[f"a.0.experts.{expert}.{name}_proj.weight"] = part.t()
    made["a.0.q_proj"] = state["a.0.wq"].view(4, 6, 2, 11).transpose(1, 2).reshape(48, 11)
    groups = state["a.0.fused"].view(3, 12, 7).split([6, 3, 3], 1)
    made |= {f"a.0.{name}": part.reshape(-1, 7) for name, part in zip("qkv", groups, strict=True)}
    made |= {"a.0.conv": state["a.0.conv"].t(), "a.0.bias": state["a.0.bias"]}
    return {name: tensor.contiguous() for name, tensor in made.items()}


def whole(value: Any) -> Tensor:
    """All of what this process holds of a tensor, of which it holds everything once."""
    if not isinstance(value, Composed):
        return value
    made = torch.zeros(value.shape, dtype=value.dtype)
    for offsets, part in value.held:
        made[tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))] = part
    assert sum(part.numel() for _, part in value.held) == value.numel()
    return made


def assert_same(found: dict[str, Any], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(whole(found[name]), tensor), name


def test_against_torch_both_ways() -> None:
    state, stored = model_tensors(), stored_tensors()
    there = rearranged(state, RULES)
    assert_same(there, stored)
    back = rearranged(stored, [rule.inverse() for rule in RULES])
    assert_same(back, state)
    assert rearranged(state, []) == state
    assert all(rule.inverse().inverse() == rule for rule in RULES)


def test_names_are_taken_as_they_are() -> None:
    rule = Rearrange("{m}.w", "100%.{m}.{e}.%s", "e x -> x")
    made = rearranged({"a{b}%d.{e}.w": torch.zeros(2, 3)}, [rule])
    assert list(made) == ["100%.a{b}%d.{e}.0.%s", "100%.a{b}%d.{e}.1.%s"]


def test_views_reach_the_model() -> None:
    state, stored = {name: torch.zeros_like(one) for name, one in model_tensors().items()}, stored_tensors()
    for name, value in rearranged(state, RULES).items():
        for offsets, part in value.held if isinstance(value, Composed) else []:
            box = tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))
            part.copy_(stored[name][box])
    state["a.0.bias"] = model_tensors()["a.0.bias"]
    assert_same(state, model_tensors())


def test_copies() -> None:
    state = rearranged(model_tensors(), RULES)
    for name, value in state.items():
        if isinstance(value, Composed):
            for made in (value.clone(), copy.deepcopy(value), pickle.loads(pickle.dumps(value)), value.detach().cpu()):
                assert torch.equal(whole(made), whole(value)), name
            assert value.clone().held[0].tensor.data_ptr() != value.held[0].tensor.data_ptr()
            with pytest.raises(CheckpointError, match="can only be saved, loaded and copied"):
                value + 1
            assert "Composed" in repr(value)


# ---- ranks ----


MESHES = {
    "rows": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "both": ((2, 2), (Shard(0), Shard(1))),
    "replicas": ((2, 2), (Replicate(), Shard(0))),
}


def distributed(state: dict[str, Tensor], mesh: str) -> dict[str, Tensor]:
    shape, placements = MESHES[mesh]
    device_mesh = init_device_mesh("cpu", shape)

    def one(tensor: Tensor) -> Tensor:
        kinds = [Replicate() if kind.is_shard() and kind.dim >= tensor.dim() else kind for kind in placements]
        return distribute_tensor(tensor, device_mesh, kinds)

    return {name: one(tensor) for name, tensor in state.items()}


def save_and_load(path: str, mesh: str, other: str) -> None:
    state = distributed(model_tensors(), mesh)
    writers = {"hf": RingHFWriter(f"{path}/hf"), "ring": RingWriter(f"{path}/ring")}
    for writer in writers.values():
        dcp.save(rearranged(state, RULES), storage_writer=writer, planner=RingSavePlanner())
    dcp.save(rearranged(state, RULES), checkpoint_id=f"{path}/stock")
    if dist.get_rank() == 0:
        assert_same(load_file(f"{path}/hf/model.safetensors"), stored_tensors())
        for folder in ("ring", "stock"):
            wanted = {name: torch.zeros_like(tensor) for name, tensor in stored_tensors().items()}
            dcp.load(wanted, checkpoint_id=f"{path}/{folder}", no_dist=True)
            assert_same(wanted, stored_tensors())
    dist.barrier()
    readers: list[Any] = [RingHFReader(f"{path}/hf"), RingReader(f"{path}/ring"), dcp.FileSystemReader(f"{path}/stock")]
    for reader in readers:
        for planner in (RingLoadPlanner(), dcp.DefaultLoadPlanner()):
            zeros = {name: torch.zeros_like(tensor) for name, tensor in model_tensors().items()}
            into = distributed(zeros, other)
            dcp.load(rearranged(into, RULES), storage_reader=reader, planner=planner)
            for name, tensor in model_tensors().items():
                value = into[name]
                assert isinstance(value, DTensor) and torch.equal(value.full_tensor(), tensor), (name, reader, planner)


@pytest.mark.parametrize(("mesh", "other"), [("rows", "columns"), ("columns", "both"), ("both", "replicas")])
def test_sharded(tmp_path: Path, mesh: str, other: str) -> None:
    _distributed.run(4, save_and_load, str(tmp_path), mesh, other)


def load_stored_apart(path: str) -> None:
    """Stored tensors that are fused in the files, and apart in the model."""
    rules = [rule.inverse() for rule in RULES]
    into = distributed({name: torch.zeros_like(tensor) for name, tensor in stored_tensors().items()}, "both")
    dcp.load(rearranged(into, rules), storage_reader=RingHFReader(path), planner=RingLoadPlanner())
    for name, tensor in stored_tensors().items():
        assert torch.equal(into[name].full_tensor(), tensor), name  # type: ignore[attr-defined]


def test_fused_in_the_files(tmp_path: Path) -> None:
    save_file(model_tensors(), tmp_path / "model.safetensors")
    _distributed.run(4, load_stored_apart, str(tmp_path))


def load_codes(path: str, scales: dict[str, Tensor], codes: dict[str, Tensor]) -> None:
    state = {"l.experts.gate_up": torch.zeros(3, 2 * 200, 150, dtype=torch.bfloat16)}
    rule = Rearrange("{m}.gate_up", "{m}.{e}.{p}.weight", "e (p o) i -> o i", {"p": ["gate", "up"]})
    for mesh in ("rows", "columns", "both"):
        into = distributed(state, mesh)
        reader = RingHFReader(path, dequantize=torch.bfloat16)
        dcp.load(rearranged(into, [rule]), storage_reader=reader, planner=RingLoadPlanner())
        found = into["l.experts.gate_up"].full_tensor()  # type: ignore[attr-defined]
        for expert in range(3):
            for number, part in enumerate(("gate", "up")):
                name = f"l.experts.{expert}.{part}.weight"
                factors = scales[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :150]
                wanted = (codes[name].float() * factors).to(torch.bfloat16)
                assert torch.equal(found[expert, 200 * number : 200 * (number + 1)], wanted), (name, mesh)


def test_quantised_experts(tmp_path: Path) -> None:
    """What is stored as codes of one expert each, with scales, and stacked in the model."""
    names = [f"l.experts.{expert}.{part}.weight" for expert in range(3) for part in ("gate", "up")]
    codes = {name: torch.randn(200, 150).to(torch.float8_e4m3fn) for name in names}
    scales = {f"{name}_scale_inv": torch.rand(2, 2) + 0.5 for name in names}
    save_file({**codes, **scales}, tmp_path / "model.safetensors")
    _distributed.run(4, load_codes, str(tmp_path), scales, codes)


def save_in_the_background(path: str) -> None:
    state = distributed(model_tensors(), "rows")
    future = dcp.async_save(
        rearranged(state, RULES),
        storage_writer=RingWriter(path),
        planner=RingSavePlanner(),
        process_group=dist.group.WORLD,
    )
    for value in state.values():
        value.to_local().zero_()  # type: ignore[attr-defined]
    future.result()


def test_staged_into_one_memory() -> None:
    state = rearranged(model_tensors(), RULES)
    buffer = StagingBuffer()
    for _ in range(2):
        staged = buffer.stage(state)
        assert_same(staged, stored_tensors())
    assert buffer.allocations == 1
    inside = {part.untyped_storage().data_ptr() for value in staged.values() for _, part in held_by(value)}
    assert len(inside) == 1


def held_by(value: Any) -> list[Any]:
    return value.held if isinstance(value, Composed) else [((), value)]


def test_in_the_background(tmp_path: Path) -> None:
    _distributed.run(4, save_in_the_background, str(tmp_path / "x"))
    wanted = {name: torch.zeros_like(tensor) for name, tensor in stored_tensors().items()}
    dcp.load(wanted, checkpoint_id=str(tmp_path / "x"), no_dist=True)
    assert_same(wanted, stored_tensors())


# ---- load_pretrained ----


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(4, 6, 10))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 36, bias=False)
        self.experts = Experts()
        self.norm = nn.LayerNorm(6)

    def _init_weights(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 5.0)


def made_model() -> nn.Module:
    torch.manual_seed(4)
    model = nn.Sequential(Block(), Block())
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def pretrained(path: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block())
    for block in model:
        fully_shard(block)
    fully_shard(model)
    diff = load_pretrained(model, path, rearrange=[QKV, EXPERTS])
    assert not diff, diff
    for (name, value), wanted in zip(model.named_parameters(), made_model().parameters(), strict=True):
        assert torch.equal(value.full_tensor(), wanted), name  # type: ignore[attr-defined]
    save_pretrained_weights(model, f"{path}/out", rearrange=[QKV, EXPERTS])
    if dist.get_rank() == 0:
        assert_same(load_file(f"{path}/out/model.safetensors"), load_file(f"{path}/model.safetensors"))


def test_pretrained(tmp_path: Path) -> None:
    state = {name: tensor.detach() for name, tensor in made_model().state_dict().items()}
    stored = {name: whole(value).contiguous() for name, value in rearranged(state, RULES).items()}
    assert "0.experts.3.up_proj.weight" in stored and "1.q_proj.weight" in stored
    save_file(stored, tmp_path / "model.safetensors")
    _distributed.run(2, pretrained, str(tmp_path))


def test_pretrained_with_a_part_missing(tmp_path: Path) -> None:
    """What is made of a tensor that is in no file gets its first values before the rest is loaded."""
    state = {name: tensor.detach() for name, tensor in made_model().state_dict().items()}
    stored = {name: whole(value).contiguous() for name, value in rearranged(state, RULES).items()}
    del stored["0.k_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block())
    with pytest.raises(KeyMismatchError, match=r"0\.k_proj\.weight"):
        load_pretrained(model, tmp_path, rearrange=[QKV, EXPERTS])
    diff = load_pretrained(model, tmp_path, rearrange=[QKV, EXPERTS], missing="allow")
    assert [item.key for item in diff.missing] == ["0.k_proj.weight"]
    weight = model.get_parameter("0.qkv.weight").detach()
    assert torch.equal(weight[:24], state["0.qkv.weight"][:24]) and torch.equal(weight[30:], state["0.qkv.weight"][30:])
    assert bool((weight[24:30] == 5.0).all())
    assert torch.equal(model.get_parameter("1.qkv.weight"), state["1.qkv.weight"])


# ---- rules that match nothing ----


def stage(first: bool) -> nn.Module:
    """Of a pipeline: only the first stage has what is turned."""
    model = nn.Module()
    model.register_parameter("conv" if first else "other", nn.Parameter(torch.arange(12.0).view(4, 3)))
    return nn.ModuleDict({"a" if first else "b": model})


def rules_on_stages(path: str) -> None:
    model = stage(dist.get_rank() == 0)
    save_pretrained_weights(model, path, rearrange=[TURNED])  # which matches on rank 0 alone
    wrong = Rearrange("{m}.cnov", "{m}.cnov", "i o -> o i")
    for call in (save_pretrained_weights, load_pretrained):
        with pytest.raises(
            CheckpointError, match=r"nothing is rearranged by '\{m\}\.cnov -> \{m\}\.cnov': of the names"
        ):
            call(model, path, rearrange=[TURNED, wrong])  # type: ignore[operator]
    for parameter in model.parameters():
        assert torch.equal(parameter, torch.arange(12.0).view(4, 3)), "nothing has been changed"
        parameter.data.zero_()
    load_pretrained(model, path, rearrange=[TURNED], unexpected="ignore")
    for parameter in model.parameters():
        assert torch.equal(parameter, torch.arange(12.0).view(4, 3))


def test_a_rule_that_matches_on_no_rank_is_an_error_on_all(tmp_path: Path) -> None:
    _distributed.run(2, rules_on_stages, str(tmp_path))
    assert load_file(tmp_path / "model.safetensors")["a.conv"].shape == (3, 4)


def test_a_rule_that_matches_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    state = {"a.conv": torch.randn(2, 3), "a.bias": torch.randn(3)}
    assert rearranged(state, [TURNED])["a.bias"] is state["a.bias"] and not caplog.text
    wrong = Rearrange("b.conv", "b.conv", "i o -> o i")
    assert rearranged(state, [TURNED, wrong])["a.conv"].shape == (3, 2)
    assert "nothing is rearranged by 'b.conv -> b.conv': of the names" in caplog.text
    caplog.clear()
    rearranged(state, [TURNED, Rearrange("a.conv", "a.c", "i o -> i o")])
    assert "'a.conv -> a.c'" in caplog.text and "earlier rule" in caplog.text


# ---- what cannot be ----


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (("a", "b", "x y"), "no ->"),
        (("a", "b", "x y -> x"), "the axes of one side are"),
        (("a.{k}", "b", "x -> x"), "is on one side only"),
        (("a.{x}", "b", "x y -> x y"), "the axes of one side are"),
        (("a", "b", "(x y -> x y"), "no list of dimensions"),
        (("a", "b", "x-y -> y x"), "no list of dimensions"),
        (("a", "b", "x y -> y x", {"z": 3}), "axes= has"),
        (("a", "b", "x y -> y x", {"x": 0}), "axes= has"),
    ],
)
def test_rules_that_cannot_be(rule: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Rearrange(*rule)


@pytest.mark.parametrize(
    ("state", "rule", "text"),
    [
        ({"a": torch.zeros(7, 2)}, ("a", "b.{p}", "(p o) i -> o i", {"p": ["x", "y"]}), "cannot be 7"),
        ({"a": torch.zeros(8)}, ("a", "b", "(n d) -> (d n)"), "cannot be told"),
        ({"a": torch.zeros(8)}, ("a", "b", "x y -> y x"), "has 1 dimensions"),
        ({"a": 3}, ("a", "b", "x -> x"), "no tensor"),
        ({"a": torch.zeros(2, 2), "b": torch.zeros(1)}, ("a", "b", "x y -> y x"), "two tensors"),
        ({"a.0": torch.zeros(2), "a.2": torch.zeros(2)}, ("a.{e}", "b", "x -> e x"), "give its size"),
        ({"a.0": torch.zeros(2), "a.1": torch.zeros(3)}, ("a.{e}", "b", "x -> e x"), "does not fit the rule"),
        (
            {"a.0": torch.zeros(2), "a.1": torch.zeros(2, dtype=torch.int8)},
            ("a.{e}", "b", "x -> e x"),
            "cannot be parts of one tensor",
        ),
        ({"a": torch.zeros(2, 2).to_sparse()}, ("a", "b", "x y -> y x"), "there are no views"),
    ],
)
def test_tensors_that_do_not_fit(state: dict[str, Any], rule: tuple[Any, ...], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        rearranged(state, [Rearrange(*rule)])


# ---- one stored tensor by several rules ----

PARTS = [
    Rearrange("{p}_proj", "wqkv", "(n h d) i -> (p n d h) i", {"p": ["q", "k", ""], "n": 2, "h": 2}),
    Rearrange("{p}_proj", "wqkv", "d i -> (p d) i", {"p": ["", "", "v"], "d": 8}),
]
"""Of what is stored in one, q and k have their halves apart in the model, and v has not."""


def parts_and_whole() -> tuple[dict[str, Tensor], Tensor]:
    parts = {f"{name}_proj": torch.randn(8, 6, generator=torch.Generator().manual_seed(ord(name))) for name in "qkv"}
    turned = [parts[f"{name}_proj"].view(2, 2, 2, 6).transpose(1, 2).reshape(8, 6) for name in "qk"]
    return parts, torch.cat([*turned, parts["v_proj"]])


def save_and_load_parts(path: str) -> None:
    parts, _ = parts_and_whole()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    places = {"q_proj": Shard(0), "k_proj": Shard(1), "v_proj": Replicate()}
    for saves in (True, False):
        state = {name: distribute_tensor(one * saves, mesh, [places[name]]) for name, one in parts.items()}
        stored: dict[str, Any] = rearranged(state, PARTS)
        if saves:
            dcp.save(stored, storage_writer=RingHFWriter(path), planner=RingSavePlanner())
            continue
        dcp.load(stored, storage_reader=RingHFReader(path), planner=RingLoadPlanner())
        assert all(torch.equal(state[name].full_tensor(), one) for name, one in parts.items())


def test_parts_by_several_rules(tmp_path: Path) -> None:
    _distributed.run(2, save_and_load_parts, str(tmp_path))
    assert torch.equal(load_file(tmp_path / "model.safetensors")["wqkv"], parts_and_whole()[1])


@pytest.mark.parametrize("axes", ({"p": ["v", "", ""], "d": 8}, {"p": ["", "", "v"], "d": 4}))
def test_parts_that_do_not_fit_each_other(axes: dict[str, Any]) -> None:
    """Two of which are the same elements, or whose wholes have other shapes."""
    parts, _ = parts_and_whole()
    parts["v_proj"] = parts["v_proj"][: axes["d"]]
    with pytest.raises(CheckpointError, match="two tensors of the state dict would be stored as 'wqkv'"):
        rearranged(parts, [PARTS[0], Rearrange("{p}_proj", "wqkv", "d i -> (p d) i", axes)])
