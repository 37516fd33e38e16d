"""dcpring.save and dcpring.load: a tree comes back exactly, or is refused before anything is written."""

from __future__ import annotations

import datetime
import logging
import sys
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import _cli
import _distributed
import _prepared
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcpring
from dcpring.errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError
from dcpring.torchside import versions


class Pair(NamedTuple):
    left: Any
    right: Any


class Own:
    pass


def same(a: Any, b: Any) -> bool:
    """Equal in values, types, keys and order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape, a.layout, a.requires_grad) == (
            b.dtype,
            b.shape,
            b.layout,
            b.requires_grad,
        ) and torch.equal(a.to_dense() if a.is_sparse else a, b.to_dense() if b.is_sparse else b)
    if isinstance(a, dict):
        return [*map(type, a)] == [*map(type, b)] and [*a] == [*b] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else a == b


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def as_a_trainer_has_it() -> dict[str, Any]:
    model, optimizer = trained()
    return {
        "epoch": 3,
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best": None, "k": {}, "paths": ("a", 1)}},
        "loops": {"fit_loop": {"state_dict": {}, "batches": Counter({"a": 2})}},
        "rng": {"python": (3, (1, 2, 3), None), "numpy": np.arange(4), "torch": torch.get_rng_state()},
    }


TREES: dict[str, Any] = {
    "a trainer's": as_a_trainer_has_it(),
    "nothing": {},
    "None": None,
    "a number": 7,
    "a tensor": torch.arange(3),
    "a list": [torch.ones(2), {}, [], (), [[{}]], {"a": [torch.zeros(1)]}],
    "a tuple": (1, (2, torch.ones(1)), ()),
    "keys": {0: 1, "0": 2, 0.5: {"x": 1}, None: 3, True: 4, (1, 2): torch.ones(1), b"b": [], "": {}, -1: {"": 1}},
    "keys that look alike": {"a": {"b": 1, "b~2": 5}, "a.b": 2, "a.b~2": torch.ones(2)},
    "keys that are numbers": {1: {2: 3}, "1": {"2": 4}, "1.2": 5, 1.2: 6},
    "our own key": {"dcpring": {"tree": 1}, "dcpring.tree": {"x": 2}, "tree": 3},
    "ordered": OrderedDict([("b", torch.ones(1)), ("a", OrderedDict())]),
    "namedtuples": Pair(1, [Pair(torch.ones(2), {}), Pair(None, "x")]),
    "parameters": {"w": nn.Parameter(torch.ones(2)), "f": nn.Parameter(torch.ones(2), requires_grad=False)},
    "gradients": {"g": torch.ones(2, requires_grad=True)},
    "kinds of tensors": [torch.eye(3).to_sparse(), torch.ones(2, 3).t(), torch.tensor(1 + 2j), torch.ones(0, 3)],
    "objects": {"when": datetime.date(2026, 1, 2), "counts": Counter("aab"), "where": Path("x"), "set": {1, 2}},
    "marks": {"m": ("dcpring.object", 3), "n": (0, "x", torch.ones(1)), "s": ["dcpring.tree", torch.ones(1)]},
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_a_tree_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    dcpring.save(TREES[name], tmp_path)
    assert same(dcpring.load(tmp_path), TREES[name])


def test_adam_goes_on(tmp_path: Path) -> None:
    model, optimizer = trained()
    dcpring.save({"optimizer": optimizer.state_dict()}, tmp_path)
    other = torch.optim.AdamW(model.parameters(), lr=1.0)
    other.load_state_dict(dcpring.load(tmp_path)["optimizer"])
    assert all(parameter in other.state for parameter in model.parameters())
    assert same(other.state_dict(), optimizer.state_dict())


def test_stock_and_the_tools_read_it(tmp_path: Path) -> None:
    tree = {"model": {"w": torch.arange(6.0)}, "optim": {0: {"m": torch.ones(2)}}, "step": 3}
    dcpring.save(tree, tmp_path)
    wanted: dict[str, Any] = {"model": {"w": torch.zeros(6)}, "optim": {"0": {"m": torch.zeros(2)}}, "step": 0}
    dcp.load(wanted, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert same(wanted, {"model": tree["model"], "optim": {"0": {"m": torch.ones(2)}}, "step": 3})
    assert dcpring.verify(tmp_path).ok
    assert "model" in _cli.run("ls", tmp_path).out


@pytest.mark.parametrize("by", ["stock", "ring"])
def test_any_checkpoint_is_loaded_as_dcp_knows_it(by: str, tmp_path: Path) -> None:
    tree = {"model": {"w": torch.arange(6.0)}, "optim": {0: {"m": torch.ones(2)}}, "steps": [1, 2], "more": [{"x": 1}]}
    writer = dcp.FileSystemWriter(tmp_path) if by == "stock" else dcpring.RingWriter(tmp_path)
    dcp.save(tree, storage_writer=writer, no_dist=True)
    loaded = dcpring.load(tmp_path)
    assert same(loaded["model"], tree["model"]) and same(loaded["optim"], {"0": {"m": torch.ones(2)}})
    assert loaded["steps"] == [1, 2] and loaded["more"] == [{"x": 1}]


def _itself() -> Any:
    tree: dict[str, Any] = {}
    tree["again"] = tree
    return tree


def _with_attribute(value: Any) -> Any:
    found = OrderedDict(x=1)
    found.more = value  # type: ignore[attr-defined]
    return found


def _noted(value: Any) -> torch.Tensor:
    found = torch.ones(2)
    found.note = value  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("value", [1, {"version": 2}, torch.arange(3.0), [Pair(1, {2: None})], "__class__"])
def test_attributes_of_state_dicts_come_back(value: Any, tmp_path: Path) -> None:
    dcpring.save({"a": [_with_attribute(value)]}, tmp_path, safe_globals=[Pair])
    loaded = dcpring.load(tmp_path, safe_globals=[Pair])["a"][0]
    assert same(loaded, OrderedDict(x=1)) and same(vars(loaded), {"more": value})


# ---- what is one thing in several places ----


def test_what_is_at_several_places_is_one_object(tmp_path: Path) -> None:
    w, p, array, inner = torch.ones(2), nn.Parameter(torch.ones(2)), np.arange(3), {"x": torch.ones(1), 0: [1]}
    sparse = torch.eye(2).to_sparse()
    tree = {"a": [w, p, array, inner, sparse], "b": (w, p, array, inner, sparse), "c": Pair(w, inner)}
    dcpring.save(tree, tmp_path)
    loaded = dcpring.load(tmp_path)
    assert same(loaded, tree)
    assert all(one is other for one, other in zip(loaded["a"], loaded["b"], strict=True))
    assert loaded["c"].left is loaded["a"][0] and loaded["c"].right is loaded["a"][3]
    assert type(loaded["a"][1]) is nn.Parameter
    wanted = {"a": [torch.zeros(2), torch.zeros(2)], "b.0": torch.zeros(2)}
    dcp.load({"a.0": wanted["a"][0], "b.0": wanted["b.0"]}, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert wanted["b.0"].tolist() == wanted["a"][0].tolist() == [1, 1], "stock finds it by each name"


def _memories() -> dict[str, tuple[dict[str, torch.Tensor], bool]]:
    """Tensors with memory in common, and whether the first reaches what the others have."""
    x = torch.arange(24.0).reshape(4, 6)
    other = torch.arange(24.0)
    return {
        "a detached one": ({"a": x, "b": x.detach(), "c": x.view(-1)}, True),
        "slices": ({"a": x, "row": x[1], "column": x[:, 2], "every other": x[::2, ::3], "one": x[3, 5]}, True),
        "the whole comes last": ({"row": x[1], "column": x[:, 2], "t": x.t()}, True),
        "bytes": ({"a": x, "bytes": x.view(torch.uint8)[1:, 3:7], "ints": x.view(torch.int32)}, True),
        "bytes that begin anywhere": (
            {"ints": x.view(-1).view(torch.int32)[2:], "bytes": x.view(-1).view(torch.uint8)[1:]},
            True,
        ),
        "expanded": ({"a": x, "e": x[0, 0].expand(5)}, True),
        "none has all": ({"a": other[:16], "b": other[8:], "c": other[10:14].view(torch.int16)}, True),
        "windows": ({"a": other[:20].unfold(0, 8, 4), "b": other[6:12]}, True),
        "of two dtypes": ({"a": torch.zeros(9), "b": torch.zeros(9, dtype=torch.float64)}, False),
        "next to each other": ({"a": other[:12], "b": other[12:]}, False),
        "columns": (dict(zip("abc", x.chunk(3, 1), strict=True)), False),
        "blocks": ({"a": x[:2, :3], "b": x[:2, 3:], "c": x[2:, :3], "d": x[2:, 3:]}, False),
    }


@pytest.mark.parametrize("name", _memories())
def test_what_shares_elements_shares_them_again(name: str, tmp_path: Path) -> None:
    tree, is_shared = _memories()[name]
    dcpring.save(tree, tmp_path)
    loaded = dcpring.load(tmp_path)
    assert same(loaded, tree)
    assert dcpring.verify(tmp_path).ok
    if is_shared:
        for one in loaded, tree:  # what is written to one of them is seen in the others, in the same places
            list(one.values())[-1].zero_()
        assert same(loaded, tree)
        assert [value.stride() for value in loaded.values()] == [value.stride() for value in tree.values()]
    else:
        assert len({value.untyped_storage().data_ptr() for value in loaded.values()}) == len(tree)
        assert sum(value.untyped_storage().nbytes() for value in loaded.values()) == sum(
            value.nbytes for value in tree.values()
        ), "and no more memory than they need"


def test_tied_weights_of_a_model_come_back_tied(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    for tree in (model.state_dict(), dict(model.named_parameters(remove_duplicate=False))):
        dcpring.save(tree, tmp_path)
        loaded = dcpring.load(tmp_path)
        assert loaded["a.weight"].data_ptr() == loaded["b.weight"].data_ptr()
        assert same(loaded, tree)
    assert loaded["a.weight"] is loaded["b.weight"]


def test_views_of_parameters(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.arange(4.0))
    dcpring.save({"w": weight, "data": weight.data, "part": weight.detach()[1:3]}, tmp_path)
    loaded = dcpring.load(tmp_path)
    loaded["part"].add_(10)
    assert loaded["w"].tolist() == loaded["data"].tolist() == [0, 11, 12, 3] and loaded["w"].requires_grad


@pytest.mark.parametrize("order", [torch.ones(2, 3).t(), torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)])
def test_strides_stay(order: torch.Tensor, tmp_path: Path) -> None:
    dcpring.save([order, order[1:]], tmp_path)
    first, _ = loaded = dcpring.load(tmp_path)
    assert same(loaded, [order, order[1:]]) and first.stride() == order.stride()


def test_attributes_of_tensors_come_back(tmp_path: Path) -> None:
    noted = torch.ones(2)
    noted.note, noted.scale, noted.more = "hi", torch.ones(1), {0: [noted.dtype]}  # type: ignore[attr-defined]
    parameter = nn.Parameter(torch.ones(2))
    parameter.tied = noted  # type: ignore[attr-defined]
    tree = {"x": noted, "p": parameter, "buffer": nn.Buffer(torch.ones(2), persistent=False), "x~note": 3}
    dcpring.save(tree, tmp_path)
    loaded = dcpring.load(tmp_path)
    assert same(loaded, tree) and same(vars(loaded["x"]), vars(noted))
    assert loaded["p"].tied is loaded["x"]
    assert isinstance(loaded["buffer"], nn.Buffer) and not loaded["buffer"].persistent


@pytest.mark.parametrize("leaf", [torch.ones(2), 5, [1, 2], "x", {}, [torch.ones(1)], {"tree": {"x": 1}}, None])
def test_the_key_of_the_manifest(leaf: Any, tmp_path: Path) -> None:
    dcpring.save({"dcpring": leaf, "a": 1}, tmp_path)
    assert same(dcpring.load(tmp_path), {"dcpring": leaf, "a": 1})
    dcp.save({"dcpring": leaf, "a": 1}, storage_writer=dcpring.RingWriter(tmp_path), no_dist=True)
    assert dcpring.load(tmp_path)["a"] == 1


@pytest.mark.parametrize(
    "layout",
    [
        ("a", 8, (1,)),
        ("a", -4, (1,)),
        ("a", 2, (1,)),
        ("a", 0, (2,)),
        ("a", 0, (-1,)),
        ("a", 0, (1 << 62,)),
        ("a", 0, ()),
        ("", 0, (1 << 50,)),
        ("gone", 0, (1,)),
        ("a", "0", (1,)),
        3,
    ],
)
def test_layouts_that_do_not_fit_are_damage(layout: Any, tmp_path: Path) -> None:
    tree = ("dcpring.object", (6, {"a": "a", "b": "b"}, {"b": layout}))
    state = {"a": torch.ones(4), "b": torch.ones(3), "dcpring.tree": tree}
    dcp.save(state, storage_writer=dcpring.RingWriter(tmp_path), no_dist=True)
    with pytest.raises(CorruptCheckpointError, match="does not fit the checkpoint"):
        dcpring.load(tmp_path)


def test_a_state_dict_keeps_the_versions_of_its_modules(tmp_path: Path) -> None:
    """Without them ``load_state_dict`` takes it for one of before modules had versions."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    dcpring.save({"model": model.state_dict()}, tmp_path)
    assert dcpring.load(tmp_path)["model"]._metadata == model.state_dict()._metadata
    assert model.state_dict()._metadata["1"]["version"] == 2


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a": {"b": Own()}}, r"cannot save .*'a.b' \(.*Own\)\. Load with dcpring.load\(.*safe_globals=\[.*Own\]"),
        ({"a": [torch.ones(1), lambda: 1]}, "cannot save 'a.1': .*pickle"),
        ({Own(): 1}, r"a key or an attribute of a dict in the tree' \(.*Own\)"),
        ({"a": _with_attribute(Own())}, r"an attribute of a dict in the tree' \(.*Own\)"),
        ({"a": _with_attribute(lambda: 1)}, "an attribute of a dict in the tree.*pickle"),
        ({"a": torch.ones(2, device="meta")}, "'a'.*meta"),
        ({"a": {"w": _noted(Own())}}, r"cannot save .*'a\.w~note' \(.*Own\)"),
        (_itself(), "holds itself"),
    ],
)
def test_what_cannot_come_back_is_refused_before_anything_is_written(tree: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        dcpring.save(tree, tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()


def test_what_was_there_stays_when_a_save_is_refused(tmp_path: Path) -> None:
    dcpring.save({"a": 1}, tmp_path)
    with pytest.raises(CheckpointError):
        dcpring.save({"a": Own()}, tmp_path)
    assert dcpring.load(tmp_path) == {"a": 1}


def test_objects_that_are_allowed(tmp_path: Path) -> None:
    dcpring.save({"a": Own()}, tmp_path, safe_globals=[Own])
    assert type(dcpring.load(tmp_path, safe_globals=[Own])["a"]) is Own
    dcpring.save({"a": Own()}, tmp_path, objects="allow")
    with pytest.raises(UntrustedCheckpointError, match="Own"):
        dcpring.load(tmp_path)
    assert type(dcpring.load(tmp_path, trusted=True)["a"]) is Own


def test_a_namedtuple_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcpring.save(Pair(1, 2), tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "Pair", namedtuple("Pair", "left middle right"))
    with pytest.raises(CheckpointError, match=r"test_single.Pair\(left, right\).*import test_single"):
        dcpring.load(tmp_path)
    monkeypatch.undo()
    assert dcpring.load(tmp_path) == Pair(1, 2)


def test_a_tree_that_does_not_fit_is_damage(tmp_path: Path) -> None:
    state = {"a": 1, "dcpring.tree": ("dcpring.object", {"a": "b"})}
    dcp.save(state, storage_writer=dcpring.RingWriter(tmp_path), no_dist=True)
    with pytest.raises(CorruptCheckpointError, match="does not fit the checkpoint"):
        dcpring.load(tmp_path)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        dcpring.load(tmp_path)


def _only_one_rank(folder: str) -> str:
    """The other ranks take no part; a collective would wait for them for ever."""
    path = f"{folder}/of-{dist.get_rank()}"
    if dist.get_rank() == 1:
        for step in range(2):
            dcpring.save({"w": torch.full((3,), float(step)), 1: {}}, path)
        assert same(dcpring.load(path), {"w": torch.ones(3), 1: {}})
    sharded = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    try:
        dcpring.save({"a": {"w": sharded}}, path)
    except CheckpointError as error:
        return str(error)
    return ""


def test_within_a_process_group_no_other_rank_is_needed(tmp_path: Path) -> None:
    for said in _distributed.run(2, _only_one_rank, str(tmp_path)):
        assert "'a.w'" in said and "Checkpointer" in said and "full_tensor()" in said
    assert same(dcpring.load(tmp_path / "of-1"), {"w": torch.ones(3), 1: {}})


# ---- what plain saves say ----


def test_a_save_says_once_that_keys_will_be_strings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    versions.say_once.cache_clear()
    _, optimizer = trained()
    for _ in range(2):
        planner = dcpring.RingSavePlanner()
        dcp.save(
            {"o": optimizer.state_dict()}, storage_writer=dcpring.RingWriter(tmp_path), planner=planner, no_dist=True
        )
    (said,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "'o.state (int)'" in said and "dcpring.save()" in said and "Checkpointer" in said
    caplog.clear()
    state = {"a": {"b": {"c": torch.ones(1)}}, "n": [1, {"x": 2}]}
    planner = dcpring.RingSavePlanner()
    dcp.save(state, storage_writer=dcpring.RingWriter(tmp_path), planner=planner, no_dist=True)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_another_process_needs_its_classes_imported(tmp_path: Path) -> None:
    """A checkpoint imports nothing by itself."""
    (tmp_path / "shapes.py").write_text(
        "print('imported')\nfrom collections import namedtuple\nPoint = namedtuple('Point', 'x')"
    )
    save = "import shapes, dcpring; dcpring.save(shapes.Point(1), 'ckpt')"
    load = "import dcpring\ntry: print(dcpring.load('ckpt'))\nexcept Exception as error: print(type(error).__name__)"
    for code, expected in (
        (save, "imported"),
        (load, "CheckpointError"),
        (f"import shapes\n{load}", "imported Point(x=1)"),
    ):
        done = _prepared.run(["-W", "ignore", "-c", code], cwd=tmp_path)
        assert done.stdout.split() == expected.split(), done.stderr
