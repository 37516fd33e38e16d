"""``dcpring convert`` as a program: arguments, output, Ctrl-C in the middle, and a full disk."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _cli
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fault._support import mounted
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemWriter

from dcpring import RingWriter
from dcpring.base.files import locked
from dcpring.cli.convert import EXAMPLES

MIB = 1 << 20
MODEL = {"layer.weight": torch.arange(12.0).view(3, 4), "layer.bias": torch.ones(3)}
STATE = {"model": MODEL, "optimizer": {"step": 3}}


class Evil:
    def __reduce__(self) -> Any:
        return print, ("code ran",)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what the examples name."""
    dcp.save(dict(STATE), storage_writer=RingWriter(tmp_path / "ckpt" / "step-100"), no_dist=True)
    dcp.save(
        {f"_orig_mod.{key}": t for key, t in MODEL.items()},
        storage_writer=FileSystemWriter(tmp_path / "old"),
        no_dist=True,
    )
    dcp.save({"evil": Evil()}, storage_writer=FileSystemWriter(tmp_path / "evil"), no_dist=True)
    torch.save(MODEL, tmp_path / "model.pt")
    assert _cli.run("convert", tmp_path / "model.pt", tmp_path / "model.safetensors").status == 0
    (tmp_path / "map.json").write_text(json.dumps({"prefixes": {"_orig_mod.": ""}}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_examples_of_the_help(here: Path) -> None:
    for command, _ in EXAMPLES:
        words = [word.strip("'") for word in command.split()]
        result = _cli.run(*words[1:])
        assert result.status == 0, result.err
    assert torch.load("step-100.pt", weights_only=True)["optimizer"] == {"step": 3}
    published = load_file("published.safetensors")
    assert {key: t.dtype for key, t in published.items()} == dict.fromkeys(MODEL, torch.bfloat16)
    assert sorted(load_file("hub/model.safetensors")) == ["layer.weight"], "its second example leaves out biases"
    into = {"model": {key: torch.zeros_like(tensor) for key, tensor in MODEL.items()}}
    dcp.load(into, storage_reader=dcp.FileSystemReader("init"), no_dist=True)
    assert torch.equal(into["model"]["layer.weight"], MODEL["layer.weight"])
    assert dcp.FileSystemReader("renamed").read_metadata().state_dict_metadata.keys() == MODEL.keys()


def test_what_it_says(here: Path) -> None:
    result = _cli.run("convert", "ckpt/step-100", "a.pt")
    assert result.out.startswith("2 tensors (60 B), 1 object to a.pt (torch, 1 file) in ") and not result.err
    result = _cli.run("convert", "ckpt/step-100", "b", "--only", "model.*", "--dtype", "bf16")
    assert result.out.startswith("2 tensors (30 B) to b (dcp, 1 file) in ")
    assert result.out.endswith("; 2 cast; 1 left out\n")
    for prefix, renamed in (("model.=", "2"), ("modle.=", "none")):
        result = _cli.run("convert", "ckpt/step-100", "b", "--overwrite", "--prefix", prefix)
        assert result.out.endswith(f"; {renamed} renamed\n")
    result = _cli.run("convert", "ckpt/step-100", "c.safetensors", "--only", "model", "--json")
    report = json.loads(result.out)
    assert {
        key: report[key] for key in ("source_format", "target_format", "tensors", "left_out", "bytes", "files")
    } == {
        "source_format": "dcp",
        "target_format": "safetensors",
        "tensors": 2,
        "left_out": 1,
        "bytes": 60,
        "files": ["c.safetensors"],
    }


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("model.pt",), "required: DST"),
        (("nowhere", "a.pt"), "nowhere does not exist"),
        (("model.pt", "model.safetensors"), "exists already; choose another name, or replace it with --overwrite"),
        (("ckpt/step-100", "a.safetensors"), "--only 'model.*'"),
        (("model.pt", "a", "--only", "x.*"), "no key of model.pt matches 'x.*'"),
        (("model.pt", "a", "--dtype", "int8"), "'int8' is no floating-point dtype"),
        (("model.pt", "a", "--prefix", "model"), "'model' is not OLD=NEW"),
        (("model.pt", "a", "--prefix", "a=b", "--key-map", "map.json"), "not allowed with argument"),
        (("model.pt", "a", "--key-map", "model.pt"), "is no key map"),
        (("model.pt", "a", "--key-map", "none.json"), "No such file or directory: none.json"),
        (("model.pt", "a.pt", "--files", "2"), "--files 2: is for DCP"),
        (("old/__0_0.distcp", "a.pt"), "is a data file of a DCP checkpoint; name the directory, old"),
        (("evil", "a.pt"), "evil: 'evil' holds more than plain data"),
        (("evil", "a.pt"), "If you trust it, pass --trusted."),
        (("model.pt", "a", "--files", "0"), "not above 0"),
        (
            ("model.pt", "a.safetensors", "--shard-size", "1G"),
            "--shard-size 1073741824: is for a directory of safetensors files",
        ),
        (("model.pt", "a", "--rank", "0"), "ranks are parts of a DCP checkpoint"),
    ],
)
def test_what_cannot_be_done(here: Path, args: tuple[str, ...], problem: str) -> None:
    before = _cli.files_in(here)
    result = _cli.run("convert", *args)
    assert result.status == 2 and problem in result.err and not result.out
    assert _cli.files_in(here) == before


# ---- interrupted ----


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("large")
    torch.save({f"w{number}": torch.zeros(64 * MIB) for number in range(3)}, path / "a.pt")
    yield path / "a.pt"
    shutil.rmtree(path)


def test_in_a_pipe_and_in_a_terminal(here: Path, large: Path) -> None:
    piped = _cli.run_apart("convert", "model.pt", "a.safetensors")
    assert piped.status == 0 and piped.out.count("\n") == 1 and not piped.err and "\x1b" not in piped.out
    shown = _cli.run_in_terminal("convert", large, "b.safetensors")
    assert shown.status == 0 and "converting" in shown.plain and "3 tensors (768.0 MiB) to b.safetensors" in shown.plain


@pytest.mark.slow(but=["options0"])
@pytest.mark.parametrize(
    "options", [("x",), ("x.pt",), ("x.safetensors",), ("x", "--to", "safetensors", "--shard-size", "300M")]
)
def test_ctrl_c_in_the_middle(tmp_path: Path, large: Path, options: tuple[str, ...]) -> None:
    torch.save({"old": torch.ones(2)}, tmp_path / "old.pt")
    target = tmp_path / options[0]
    assert _cli.run("convert", tmp_path / "old.pt", target, *options[1:]).status == 0
    before = _cli.files_in(tmp_path)

    def is_writing(_: int) -> bool:
        return any(".tmp" in name and size > 0 for name, size in _cli.files_in(tmp_path).items())

    result = _cli.interrupted("convert", large, target, *options[1:], "--overwrite", when=is_writing)
    assert result.status == 130 and result.err == "dcpring: interrupted\n"
    assert _cli.files_in(tmp_path) == before


@pytest.mark.parametrize("name", ["x", "x.pt"])
def test_what_a_killed_one_leaves_goes_with_the_next(here: Path, large: Path, name: str) -> None:
    def unfinished() -> list[Path]:
        return sorted(here.glob(f".{name}.*.tmp"))

    other = here / f".y{name}.0123456789abcdef.tmp"
    other.write_text("of another target")

    def is_writing(_: int) -> bool:
        return any(".tmp" in file and size > 0 for file, size in _cli.files_in(here).items() if "y" not in file)

    killed = _cli.interrupted("convert", large, name, when=is_writing, by=signal.SIGKILL)
    assert killed.status == -signal.SIGKILL and len(unfinished()) == 1
    with locked(unfinished()[0]):  # as who is still at work
        assert _cli.run("convert", "model.pt", name).status == 0
        assert len(unfinished()) == 1
    assert _cli.run("convert", "model.pt", name, "--overwrite").status == 0
    assert unfinished() == [] and other.exists()


# ---- a full disk ----


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mounted(tmp_path_factory.mktemp("images") / "disk", "ext4", 40 * MIB, "-q", "-m", "0") as where:
        yield where


@pytest.mark.parametrize(
    "options", [("x",), ("x.pt",), ("x.safetensors",), ("x", "--to", "safetensors", "--shard-size", "9M")]
)
def test_a_full_disk(tmp_path: Path, disk: Path, options: tuple[str, ...]) -> None:
    torch.save({"old": torch.ones(2)}, tmp_path / "old.pt")
    torch.save({f"w{number}": torch.zeros(2 * MIB) for number in range(8)}, tmp_path / "new.pt")
    target: Any = disk / options[0]
    assert _cli.run("convert", tmp_path / "old.pt", target, *options[1:], "--overwrite").status == 0
    before = _cli.files_in(disk)
    result = _cli.run("convert", tmp_path / "new.pt", target, *options[1:], "--overwrite")
    assert result.status == 2 and "No space left on device" in result.err and str(disk) in result.err
    assert _cli.files_in(disk) == before
    shutil.rmtree(target) if target.is_dir() else target.unlink()
