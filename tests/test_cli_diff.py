"""``dcpring diff`` and ``diff_checkpoints``: values of every kind, whatever the sharding, and what cannot be read."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import _cli
import _distributed
import _kinds
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcpring import _C, RingSavePlanner, RingWriter, diff_checkpoints

WRITERS: dict[str, Any] = {
    "stock": lambda path: {"storage_writer": FileSystemWriter(path)},
    "ring": lambda path: {"storage_writer": RingWriter(path), "planner": RingSavePlanner()},
}


def _save(path: Path, state: dict[str, Any], writer: str = "ring") -> Path:
    dcp.save(state, no_dist=True, **WRITERS[writer](path))
    return path


# ---- the same ----


def test_everything_is_the_same_by_all_writers(tmp_path: Path) -> None:
    state = {"model": _kinds.everything(), "step": 7, "lr": [0.1, {"a": (1, 2)}]}
    for writer in WRITERS:
        _save(tmp_path / writer, state, writer)
    for a, b in (("stock", "ring"), ("ring", "stock"), ("ring", "ring")):
        result = _cli.run("diff", tmp_path / a, tmp_path / b)
        assert result.status == 0 and result.out.startswith("the same; compared "), result
    diff = diff_checkpoints(tmp_path / "stock", tmp_path / "ring")
    assert not diff and diff.tensors_compared == len(_kinds.everything()) and diff.objects_compared == 3


def _save_sharded(path: str, writer: str, dim: int) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {name: torch.randn(37, 50) for name in ("same", "other")}
    state["other"][36, 49] += dim
    dcp.save({n: distribute_tensor(t, mesh, [Shard(dim)]) for n, t in state.items()}, **WRITERS[writer](path))


def test_other_sharding_is_no_difference(tmp_path: Path) -> None:
    _distributed.run(3, _save_sharded, str(tmp_path / "a"), "stock", 0)
    _distributed.run(2, _save_sharded, str(tmp_path / "b"), "ring", 1)
    diff = diff_checkpoints(tmp_path / "a", tmp_path / "b")
    (found,) = diff.tensors
    assert (found.key, found.changed, found.where) == ("other", 1, (36, 49)) and found.distance == pytest.approx(1)


# ---- values ----


def _numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits, with NaN where the dtype has it."""
    return _kinds.random(dtype, *shape)


@pytest.mark.parametrize("dtype", _kinds.DTYPES, ids=str)
def test_values_against_torch(dtype: torch.dtype) -> None:
    """What the core counts, against what torch says of the same elements."""
    torch.manual_seed(1)
    a = _numbers(dtype, 3, 777)
    b = a.clone()
    b.view(-1).view(torch.uint8)[:: 7 * dtype.itemsize] ^= 1
    ((changed, differing, nan_a, nan_b, first, farthest, distance, relative),) = _C.compare(
        _C.Tensors([a]), _C.Tensors([b]), 0.0, 0.0
    )
    bits = (a.view(-1).view(torch.uint8) != b.view(-1).view(torch.uint8)).view(-1, dtype.itemsize).any(1)
    assert changed == differing == int(bits.sum()) and first == int(bits.nonzero()[0])
    if dtype == getattr(torch, "float4_e2m1fn_x2", None):
        assert (nan_a, nan_b, farthest) == (0, 0, -1)
        return
    wide = torch.complex128 if dtype.is_complex else torch.float64
    x, y = (t.to(torch.complex64 if dtype == torch.complex32 else wide).to(wide).view(-1) for t in (a, b))
    assert (nan_a, nan_b) == (int(x.isnan().sum()), int(y.isnan().sum()))
    gaps = (x - y).abs().masked_fill(~bits, -1.0)
    if dtype in (torch.int64, torch.uint64):
        gaps = torch.tensor(
            [abs(p - q) for p, q in zip(a.view(-1).tolist(), b.view(-1).tolist(), strict=True)]
        ).double()
        gaps = gaps.masked_fill(~bits, -1.0)
    known = gaps.masked_fill(gaps.isnan(), -1.0)
    assert distance == pytest.approx(float(known.max()), rel=1e-12) and known[farthest] == known.max()
    sizes = torch.maximum(x.abs(), y.abs())
    ratios = torch.where(known > 0, known / sizes, 0.0).nan_to_num(math.inf)
    assert relative == pytest.approx(float(ratios.max()), rel=1e-9)


def test_neighbours_beyond_what_doubles_tell_apart(tmp_path: Path) -> None:
    a = torch.tensor([(1 << 62) + 1, -(1 << 63), 5])
    b = torch.tensor([1 << 62, (1 << 63) - 1, 5])
    diff = diff_checkpoints(_save(tmp_path / "a", {"x": a[:1]}), _save(tmp_path / "b", {"x": b[:1]}))
    assert diff.tensors[0].distance == 1 and diff.tensors[0].values == ((1 << 62) + 1, 1 << 62)
    ((*_, distance, _),) = _C.compare(_C.Tensors([a]), _C.Tensors([b]), 0.0, 0.0)
    assert distance == 2.0**64


def test_nan_zero_and_infinity(tmp_path: Path) -> None:
    nan, inf = math.nan, math.inf
    a = torch.tensor([nan, 0.0, 1.0, inf, nan, 2.0, inf])
    b = torch.tensor([nan, -0.0, nan, -inf, 3.0, 2.0, inf])
    (found,) = diff_checkpoints(_save(tmp_path / "a", {"x": a}), _save(tmp_path / "b", {"x": b})).tensors
    assert (found.changed, found.differing, found.nans, found.where) == (4, 4, (2, 2), (3,))
    assert found.distance == found.relative == inf
    document = json.loads(_cli.run("diff", tmp_path / "a", tmp_path / "b", "--json").out)
    (entry,) = document["tensors"]
    assert entry["distance"] == "inf" and entry["values"] == ["inf", "-inf"]
    ((changed, differing, *_),) = _C.compare(_C.Tensors([a]), _C.Tensors([b]), 1e9, 1e9)
    assert (changed, differing) == (4, 3), "only 0 and -0 are close"


def test_tolerance(tmp_path: Path) -> None:
    a, b = torch.tensor([1.0, 100.0, 0.0]), torch.tensor([1.0, 101.0, 0.5])
    paths = _save(tmp_path / "a", {"x": a}), _save(tmp_path / "b", {"x": b})
    assert diff_checkpoints(*paths, atol=0.6).tensors[0].differing == 1
    within = diff_checkpoints(*paths, atol=0.5, rtol=0.01)
    assert not within and within.tensors[0].changed == 2
    assert _cli.run("diff", *paths, "--atol", "0.5", "--rtol", "0.01").status == 0
    assert _cli.run("diff", *paths, "--atol", "0.4", "--rtol", "0.01").status == 1
    assert _cli.run("diff", *paths, "--atol", "-1").status == _cli.run("diff", *paths, "--rtol", "nan").status == 2
    with pytest.raises(ValueError, match="0 or more"):
        diff_checkpoints(*paths, atol=-1)


def test_what_cannot_be_compared_in_the_core() -> None:
    ones = torch.ones(2, 3)
    for other in (torch.ones(3, 2), torch.ones(2, 3).double(), torch.ones(3, 2).t(), torch.ones(2, 3).to_sparse()):
        with pytest.raises(ValueError, match="not contiguous CPU memory of one dtype and shape"):
            _C.compare(_C.Tensors([ones]), _C.Tensors([other]), 0.0, 0.0)
    with pytest.raises(ValueError, match="1 tensors against 0"):
        _C.compare(_C.Tensors([ones]), _C.Tensors([]), 0.0, 0.0)
    with pytest.raises(TypeError):
        _C.compare([ones], [ones], 0.0, 0.0)  # type: ignore[arg-type]


# ---- keys and objects ----


def test_keys_shapes_and_dtypes(tmp_path: Path) -> None:
    layers = {f"{i}.w": torch.ones(2) for i in range(3)}
    a = _save(tmp_path / "a", {"_orig_mod": dict(layers), "s": torch.ones(2), "d": torch.ones(2), "k": 1, "only": 1})
    b = _save(tmp_path / "b", {**layers, "s": torch.ones(3), "d": torch.ones(2).half(), "k": torch.ones(1)})
    result = _cli.run("diff", a, b, "--quick")
    assert result.status == 1 and "torch.compile" not in result.out
    assert "the first was saved from a compiled module; compare with the key map normalize" in result.out
    document = json.loads(_cli.run("diff", a, b, "--json").out)
    assert set(document) == {
        *("a", "b", "same", "quick", "atol", "rtol", "compared", "only_in_a", "only_in_b"),
        *("shapes", "dtypes", "tensors", "objects"),
    }
    assert {item["key"]: item["closest"] for item in document["only_in_a"]} == {
        **{f"_orig_mod.{i}.w": f"{i}.w" for i in range(3)},
        "only": None,
    }
    assert document["shapes"] == [
        {"key": "s", "a": {"shape": [2], "dtype": "float32"}, "b": {"shape": [3], "dtype": "float32"}},
        {"key": "k", "a": {"shape": None, "dtype": None}, "b": {"shape": [1], "dtype": "float32"}},
    ]
    assert [item["key"] for item in document["dtypes"]] == ["d"]
    for first, second in ((a, b), (b, a)):
        mapped = json.loads(_cli.run("diff", first, second, "--key-map", "normalize", "--json").out)
        assert mapped["compared"]["tensors"] == 3
    assert _cli.run("diff", a, b, "--key-map", "normalize", "--only", "?.w").status == 0


def test_key_maps(tmp_path: Path) -> None:
    a = _save(tmp_path / "a", {"old": {"w": torch.ones(2)}})
    b = _save(tmp_path / "b", {"new": {"w": torch.ones(2)}})
    table = tmp_path / "map.json"
    table.write_text('{"prefixes": {"old.": "new."}}')
    assert _cli.run("diff", a, b).status == 1
    assert _cli.run("diff", a, b, "--key-map", table).status == 0
    assert not diff_checkpoints(a, b, key_map={"old.w": "new.w"})
    table.write_text('{"patterns": [["old.(.*)", "\\\\9"]]}')
    for bad in (table, tmp_path / "nothing.json"):
        result = _cli.run("diff", a, b, "--key-map", bad)
        assert result.status == 2 and result.err and not result.out


def test_tied_tensors_are_compared_by_all_their_names(tmp_path: Path) -> None:
    def tied(value: float) -> dict[str, Any]:
        one = torch.full((1000,), value)
        return {f"w{i}": one for i in range(50)}

    a, b = _save(tmp_path / "a", tied(1.0)), _save(tmp_path / "b", tied(2.0))
    diff = diff_checkpoints(a, b)
    assert [found.key for found in diff.tensors] == [f"w{i}" for i in range(50)]
    assert diff.tensors_compared == 50


class Evil:
    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> Any:
        return print, (self.text,)


def test_objects(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    same = {"nan": math.nan, "t": torch.ones(2), "nested": [1, {"a": (2, "b")}], "evil": Evil("ran")}
    left = {"n": 1, "d": {"x": 1, "y": {2}}, "code": Evil("ran"), "typed": 1}
    right = {"n": 2, "d": {"x": 1, "y": {3}}, "code": Evil("has run"), "typed": 1.0}
    a = _save(tmp_path / "a", {f"same.{k}": v for k, v in same.items()} | left, "stock")
    b = _save(tmp_path / "b", {f"same.{k}": v for k, v in same.items()} | right)
    found = {diff.key: diff.difference for diff in diff_checkpoints(a, b).objects}
    assert set(found) == {"n", "d.y", "code", "typed"}
    assert found["n"] == "1 is 2" and found["typed"] == "1 is 1.0" and "no plain data" in found["code"]
    assert "ran" not in capfd.readouterr().out


def test_an_object_that_holds_another_very_often(tmp_path: Path) -> None:
    """A stranger's few bytes must not take forever."""
    for number in (1, 2):
        value: list[Any] = [number]
        for _ in range(60):
            value = [value, value]
        _save(tmp_path / str(number), {"o": (value,)})
    (found,) = diff_checkpoints(tmp_path / "1", tmp_path / "2").objects
    assert found.difference.endswith("1 is 2")


def test_sparse_tensors(tmp_path: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        return {"coo": torch.eye(4).mul(value).to_sparse(), "csr": torch.eye(4).mul(value).to_sparse_csr()}

    paths = [_save(tmp_path / str(number), state(value)) for number, value in enumerate((1.0, 1.0, 2.0))]
    assert not diff_checkpoints(paths[0], paths[1])
    assert [found.key for found in diff_checkpoints(paths[0], paths[2]).tensors if found.problem] == ["coo", "csr"]


# ---- what cannot be read ----


@pytest.mark.parametrize("writer", WRITERS)
def test_damaged_and_missing_values(tmp_path: Path, writer: str) -> None:
    torch.manual_seed(0)
    state = {"a": torch.randn(1 << 18), "b": torch.randn(1 << 18), "o": {1, 2}}
    good, bad = _save(tmp_path / "good", state), _save(tmp_path / "bad", state, writer)
    (file,) = bad.glob("*.distcp")
    data = file.read_bytes()
    at = data.find(_kinds.raw(state["b"])[:64])
    file.write_bytes(data[: at + 100] + bytes([data[at + 100] ^ 1]) + data[at + 101 :])
    result = _cli.run("diff", good, bad)
    assert result.status == 1 and "cannot compare b: " in result.err and "1 that cannot be compared" in result.out
    file.unlink()
    document = json.loads(_cli.run("diff", good, bad, "--json").out)
    assert {item["key"] for item in document["tensors"]} == {"a", "b"} and [o["key"] for o in document["objects"]] == [
        "o"
    ]
    assert all("No such file" in item["problem"] for item in (*document["tensors"], *document["objects"]))
    (bad / ".metadata").write_bytes(b"no pickle")
    result = _cli.run("diff", good, bad)
    assert result.status == 2 and "damaged" in result.err


def _save_alone(path: str, value: float) -> None:
    state = {"w": torch.full((4,), value + dist.get_rank())}
    dcp.save(state, storage_writer=RingWriter(path), use_collectives=False)


def test_rank_local_metadata(tmp_path: Path) -> None:
    _distributed.run(2, _save_alone, str(tmp_path / "a"), 0.0)
    _distributed.run(2, _save_alone, str(tmp_path / "b"), 0.0)
    assert _cli.run("diff", tmp_path / "a", tmp_path / "b").status == 0
    _distributed.run(2, _save_alone, str(tmp_path / "b"), 1.0)
    assert [found.key for found in diff_checkpoints(tmp_path / "a", tmp_path / "b").tensors] == [
        "(rank 0).w",
        "(rank 1).w",
    ]
    assert _cli.run("diff", tmp_path / "a", tmp_path / "b", "--rank", "1").status == 1


# ---- size ----

BOUNDED = """
import resource, sys
from dcpring import diff_checkpoints
import torch
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
diff = diff_checkpoints(*sys.argv[1:])
(found,) = diff.tensors
assert found.where == (999, 77) and found.changed == 1, found
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) >> 10)
"""


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path) -> None:
    """Two tensors of 512 MiB in far less."""
    big = torch.randint(0, 255, (1000, (512 << 20) // 1000), dtype=torch.uint8)
    a = _save(tmp_path / "a", {"big": big})
    big[999, 77] ^= 1
    b = _save(tmp_path / "b", {"big": big}, "stock")
    del big
    command = [sys.executable, "-c", BOUNDED, str(a), str(b)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 400, f"{done.stdout} MiB"


def test_interrupted(tmp_path: Path) -> None:
    a = _save(tmp_path / "a", {f"w{i}": torch.ones(64) * i for i in range(20_000)})
    before = _cli.files_in(tmp_path)
    (file,) = a.glob("*.distcp")
    result = _cli.interrupted("diff", a, a, when=lambda process: _cli.has_open(process, file))
    assert result.status == 130 and result.err.strip().endswith("interrupted"), result
    assert _cli.files_in(tmp_path) == before


def test_many_problems_are_told_in_few_lines(tmp_path: Path) -> None:
    a, b = (_save(tmp_path / name, {f"k{i}": torch.ones(4) for i in range(30)}) for name in "ab")
    next(b.glob("*.distcp")).unlink()
    result = _cli.run("diff", a, b)
    assert result.status == 1 and result.err.count("cannot compare k") == 20
    assert "and 10 more" in result.err and "30 that cannot be compared" in result.out


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    a, b = _save(tmp_path / "a", {"x": 1, "y": 1}), _save(tmp_path / "b", {"x": 1, "z": 1})
    assert _cli.run("diff", a, b, "--only", "x").status == 0
    assert _cli.run("diff", a, b, "--only", "z").status == 1
    result = _cli.run("diff", a, b, "--only", "x", "--only", "modle.*")
    assert result.status == 2 and "no key of either matches 'modle.*'" in result.err and not result.out


def test_keys_stay_whole_on_a_narrow_terminal(tmp_path: Path) -> None:
    key = "optim.state.layers.10.attn.weight.exp_avg_sq"
    a, b = _save(tmp_path / "a", {key: torch.ones(64), "n": 1}), _save(tmp_path / "b", {key: torch.zeros(64), "n": 2})
    result = _cli.run_in_terminal("diff", a, b, columns=80)
    assert f"\n{key}  " in result.plain and "different objects (1):\n" in result.plain
    assert "    64  " in result.plain and "NaN in A" not in result.plain
    assert "1 tensor with other values" in result.plain
    assert "NaN in A" in _cli.run_in_terminal("diff", a, b, columns=160).plain


def test_in_a_terminal(tmp_path: Path) -> None:
    a = _save(tmp_path / "a", {f"m.{i}.w": torch.ones(64) for i in range(60)})
    b = _save(tmp_path / "b", {f"m.{i}.w": torch.zeros(64) for i in range(60)} | {"evil\x1b[31m": 1})
    result = _cli.run_in_terminal("diff", a, b)
    assert result.status == 1 and "evil\\x1b[31m" in result.plain
    assert "60 tensors with other values" in result.plain and "a pipe gets all" in result.plain
