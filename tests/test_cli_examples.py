"""docs/cli.md is what the parser says, every option is described, and every example does what it says."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import _cli
import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _cli_page import PAGE, help_of, options_of, page
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcpring
from dcpring.cli._app import make_parser
from dcpring.cli._parser import Example, Parser
from dcpring.names.key_map import KeyTable

PARSERS = make_parser()[1].parsers
EXAMPLES = [
    pytest.param(example, id=example.command.removeprefix("dcpring ")[:60])
    for parser in PARSERS.values()
    for example in parser.examples
]
_QUOTED = re.compile("'[^']*'")
_FOR_THE_SHELL = re.compile(r"[|<>&;*?$~`{(\"]")


# ---- the directory that examples run in ----


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 96), nn.Linear(96, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


def make_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(*(Block() for _ in range(3)))


def _train_and_save(folder: str) -> None:
    """Two steps, a checkpoint after each: every rank writes its part."""
    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    for step in (100, 200):
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        trace = {}
        if "trace" in inspect.signature(dcpring.RingWriter).parameters:
            Path(folder, "trace").mkdir(exist_ok=True)
            trace = {"trace": f"{folder}/trace/t.json"}
        with dcpring.Checkpointer(f"{folder}/ckpt", state, writer_options=trace) as checkpointer:
            checkpointer.save(step)
        if step == 100:
            _save_weights(model, Path(folder))


def _save_weights(model: nn.Module, folder: Path) -> None:
    """The whole model in other ways; by rank 0."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        wrapped = {"model": {f"_orig_mod.{key}": value for key, value in weights.items()}}
        dcp.save(wrapped, storage_writer=FileSystemWriter(folder / "old"), no_dist=True)
        torch.save(weights, folder / "model.pt")
        save_file(weights, folder / "model.safetensors")


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See the names in it: they are those that examples use."""
    where = tmp_path_factory.mktemp("examples")
    _distributed.run(2, _train_and_save, str(where))
    table = KeyTable(prefixes={"model._orig_mod.": "model."})
    (where / "train.py").write_text("import sys\nassert sys.argv == ['train.py', '--steps', '2']\n")
    (where / "map.json").write_text(json.dumps(table.as_json()))
    return where


@pytest.fixture
def directory(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of its own, which is the current directory."""
    where = tmp_path / "work"
    shutil.copytree(prepared, where)
    monkeypatch.chdir(where)
    return where


def test_what_examples_run_on(directory: Path) -> None:
    for step in ("step-100", "step-200"):
        names = {path.name.split("_")[2] for path in (directory / "ckpt" / step).glob("*.distcp")}
        assert names == {"0", "1"}, "both ranks have written"
    kept = dcpring.RingReader(directory / "ckpt" / "step-100").read_metadata().state_dict_metadata
    assert any(key.startswith("model.") for key in kept) and any(key.startswith("optimizer.") for key in kept)


# ---- running them ----


def _run_in_shell(command: str, bin: Path) -> _cli.Result:
    bin.mkdir()
    program = bin / "dcpring"
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-m", "dcpring"])} "$@"\n')
    program.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", f"set -eo pipefail\n{command}"],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": f"{bin}:{os.environ['PATH']}"},
        timeout=_cli.TIMEOUT_SECONDS,
        check=False,
    )
    return _cli.Result(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example: Example, directory: Path, tmp_path: Path) -> None:
    """Through bash where it needs a shell, or runs a program; else in this process, which is faster."""
    if "dcpring run" in example.command or _FOR_THE_SHELL.search(_QUOTED.sub("", example.command)):
        result = _run_in_shell(example.command, tmp_path / "bin")
    else:
        program, *args = shlex.split(example.command)
        assert program == "dcpring"
        result = _cli.run(*args)
        if "--json" in args:
            json.loads(result.out)
    assert result.status == example.status, result.err
    assert "Traceback" not in result.err


# ---- the page and the help ----


def test_the_page_is_what_the_parser_says() -> None:
    assert PAGE.read_text() == page(), "run: python tests/_cli_page.py"


def test_the_page_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    narrow = page()
    monkeypatch.setenv("COLUMNS", "200")
    assert page() == narrow


@pytest.mark.parametrize("parser", [pytest.param(parser, id=name) for name, parser in PARSERS.items()])
def test_everything_is_described(parser: Parser) -> None:
    assert parser.description and parser.summary and not parser.summary.endswith(".")
    for action in options_of(parser):
        assert help_of(action, parser).strip(), f"{parser.prog} {action.dest} has no help"
    assert len(parser.examples) >= 2, f"{parser.prog} has {len(parser.examples)} example"
    for example in parser.examples:
        assert parser.prog in example.command and example.meaning


def test_no_example_is_there_twice() -> None:
    commands = Counter(example.command for parser in PARSERS.values() for example in parser.examples)
    assert max(commands.values()) == 1
