"""dcpring.install(): the names of torch's classes make dcpring's objects, wherever they are; no trace is left after."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _distributed
import _prepared
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    QuantizedHuggingFaceStorageReader,
)
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import dcpring
from dcpring import (
    RingHFReader,
    RingHFWriter,
    RingLoadPlanner,
    RingQuantizedHFReader,
    RingReader,
    RingSavePlanner,
    RingWriter,
)
from dcpring.torchside import versions

PAIRS = {
    FileSystemWriter: RingWriter,
    FileSystemReader: RingReader,
    HuggingFaceStorageReader: RingHFReader,
    HuggingFaceStorageWriter: RingHFWriter,
    QuantizedHuggingFaceStorageReader: RingQuantizedHFReader,
    DefaultSavePlanner: RingSavePlanner,
    DefaultLoadPlanner: RingLoadPlanner,
}
PAIRS_BY_NAME = {stock.__name__: stock for stock in PAIRS}


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    dcpring.uninstall()


def named(stock: type) -> Any:
    """What the name of torch's class stands for, in torch's package and here, where it was imported before."""
    found = getattr(dcp, stock.__name__)
    assert found is globals()[stock.__name__]
    return found


def made(stock: type, path: Path) -> Any:
    return named(stock)() if stock.__name__.endswith("Planner") else named(stock)(path)


def is_ring(path: Path) -> bool:
    """Whether dcpring wrote a checkpoint: its files have names of their own."""
    files = list(path.glob("*.distcp"))
    assert files and (path / ".metadata").exists()
    return all(file.name.count(".") == 2 for file in files)


@pytest.mark.parametrize("stock", PAIRS)
def test_a_call_of_torchs_class_makes_ours(stock: type, tmp_path: Path) -> None:
    with dcpring.install():
        value = made(stock, tmp_path)
        assert type(value) is PAIRS[stock] and isinstance(value, stock) and isinstance(value, named(stock))
        assert issubclass(PAIRS[stock], named(stock)) and isinstance(named(stock) | None, types.UnionType)
    assert named(stock) is stock and type(made(stock, tmp_path)) is stock


@pytest.mark.parametrize("stock", PAIRS)
def test_what_was_made_before_stays_torchs(stock: type, tmp_path: Path) -> None:
    before = made(stock, tmp_path)
    with dcpring.install():
        assert type(before) is stock and isinstance(before, named(stock))
        assert type(copy.copy(before)) is stock
        assert pickle.loads(pickle.dumps(named(stock))) is named(stock)
        assert type(pickle.loads(pickle.dumps(made(stock, tmp_path)))) is PAIRS[stock]
    assert type(pickle.loads(pickle.dumps(before))) is stock


def test_a_class_that_was_kept_makes_what_it_is(tmp_path: Path) -> None:
    kept = FileSystemReader
    with dcpring.install():
        assert type(kept(tmp_path)) is kept
        stand_in = FileSystemReader
    assert stand_in is not kept and isinstance(stand_in(tmp_path), kept)
    assert type(FileSystemReader(tmp_path)) is kept


class OwnWriter(FileSystemWriter):
    pass


class OwnPlanner(DefaultSavePlanner):
    def __init__(self, extra: int) -> None:
        super().__init__(flatten_state_dict=False)
        self.extra = extra


def test_subclasses_stay_what_they_are(tmp_path: Path) -> None:
    with dcpring.install():

        class Later(DefaultLoadPlanner):
            pass

        assert issubclass(Later, PAIRS_BY_NAME["DefaultLoadPlanner"]) and isinstance(Later(), DefaultLoadPlanner)
        assert not isinstance(DefaultLoadPlanner(), Later)
        assert type(OwnWriter(tmp_path)) is OwnWriter and not isinstance(OwnWriter(tmp_path), RingWriter)
        assert type(OwnPlanner(3)) is OwnPlanner and not OwnPlanner(3).flatten_state_dict
        assert type(Later(allow_partial_load=True)) is Later
        shards = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)  # for who consolidates by himself
        assert type(shards) is HuggingFaceStorageWriter
        assert type(HuggingFaceStorageWriter(str(tmp_path), None, 1, True, True)) is RingHFWriter
        assert type(_EmptyStateDictLoadPlanner()) is _EmptyStateDictLoadPlanner
        assert type(RingWriter(tmp_path)) is RingWriter


def attributes() -> dict[str, dict[str, Any]]:
    """All that torch's modules of checkpoints and their classes hold."""
    found: dict[str, dict[str, Any]] = {"meta_path": {str(index): one for index, one in enumerate(sys.meta_path)}}
    for name, module in list(sys.modules.items()):
        if not name.startswith(("torch.distributed.checkpoint", "multiprocessing")):
            continue
        found[name] = dict(vars(module))
        stand_ins = {named(stock) for stock in PAIRS} - PAIRS.keys()
        for kind in {one for one in vars(module).values() if isinstance(one, type)} - stand_ins | PAIRS.keys():
            if kind.__module__.startswith("torch.distributed.checkpoint"):
                found[f"{kind.__module__}.{kind.__qualname__}"] = dict(vars(kind))
    return found


def differing(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> set[str]:
    caches = {"_abc_impl", "__abstractmethods__"}
    return {
        f"{owner}:{name}"
        for owner in before.keys() | after.keys()
        for name in before.get(owner, {}).keys() | after.get(owner, {}).keys()
        if name not in caches and before.get(owner, {}).get(name) is not after.get(owner, {}).get(name)
    }


def test_uninstall_leaves_no_trace(tmp_path: Path) -> None:
    with dcpring.install():  # all is imported
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a", no_dist=True)
    before = attributes()
    config = dict(vars(__import__("multiprocessing.process", fromlist=["x"]).current_process())["_config"])
    dcpring.install()
    changed = {name.partition(":")[2] for name in differing(before, attributes())}
    assert changed == {stock.__name__ for stock in PAIRS}, "names of modules, and nothing in classes"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a", no_dist=True)
    dcpring.uninstall()
    assert differing(before, attributes()) == set()
    assert config == vars(__import__("multiprocessing.process", fromlist=["x"]).current_process())["_config"]


def test_signatures_and_words_are_torchs(tmp_path: Path) -> None:
    before = {stock: (str(inspect.signature(stock)), stock.__doc__, stock.__init__.__doc__) for stock in PAIRS}
    with dcpring.install():
        for stock, words in before.items():
            one = named(stock)
            assert words == (str(inspect.signature(one)), one.__doc__, one.__init__.__doc__)
        assert list(inspect.signature(OwnPlanner).parameters) == ["extra"]
        with pytest.raises(TypeError, match="path"):
            FileSystemWriter()  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="colour"):
            FileSystemReader(tmp_path, colour="red")  # type: ignore[call-arg]


def test_save_load_and_async_save_by_checkpoint_id(tmp_path: Path) -> None:
    state = {"w": torch.arange(10.0), "n": {"step": 3}}
    with dcpring.install():
        dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
        loaded = {"w": torch.zeros(10), "n": {"step": 0}}
        dcp.load(loaded, checkpoint_id=tmp_path / "a", no_dist=True)
    assert is_ring(tmp_path / "a") and torch.equal(loaded["w"], state["w"]) and loaded["n"] == {"step": 3}  # type: ignore[arg-type]
    dcp.save(state, checkpoint_id=tmp_path / "b", no_dist=True)
    assert not is_ring(tmp_path / "b")


def test_installations_may_be_nested_and_the_last_counts(tmp_path: Path) -> None:
    with dcpring.install(writer_options={"workers": 3}) as outer:
        assert FileSystemWriter(tmp_path).options.workers == 3  # type: ignore[attr-defined]
        with dcpring.install(writer_options={"workers": 5}) as inner:
            assert FileSystemWriter(tmp_path).options.workers == 5  # type: ignore[attr-defined]
        assert outer.is_active and not inner.is_active
        assert FileSystemWriter(tmp_path).options.workers == 3  # type: ignore[attr-defined]
    assert type(FileSystemWriter(tmp_path)) is FileSystemWriter
    outer.uninstall()


def test_what_the_program_gives_comes_before_the_options(tmp_path: Path) -> None:
    with dcpring.install(writer_options={"overwrite": False, "sync_files": False}):
        writer = FileSystemWriter(tmp_path, True, True, 100)
        assert not writer.overwrite and writer.sync_files and writer.thread_count == 100


def test_wrong_options_are_refused_at_once() -> None:
    for options, words in (
        ({"writer_options": {"wrkers": 3}}, r"writer_options: RingWriter\(\) has no argument 'wrkers'; did you mean"),
        ({"load_planner_options": {"x": 1}}, r"load_planner_options: RingLoadPlanner\(\) has no argument 'x'"),
        ({"reader_options": 3}, "reader_options=3: must be a mapping"),
    ):
        with pytest.raises(TypeError, match=words):
            dcpring.install(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="trusted='yes': must be True, False or"):
        dcpring.install(trusted="yes")  # type: ignore[arg-type]
    assert type(DefaultSavePlanner()) is DefaultSavePlanner


def test_what_dcpring_does_not_take_goes_to_torch_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    versions.say_once.cache_clear()
    with dcpring.install():
        for _ in range(2):
            writer = FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
            assert type(writer) is FileSystemWriter
            assert type(FileSystemReader("gs://bucket/step-1")) is FileSystemReader
            assert type(FileSystemReader("gs://bucket/step-2")) is FileSystemReader
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2 and "SAFETENSORS is torch's own" in said[0] and "path of gs:// is torch's own" in said[1]


def test_the_log_says_what_was_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dcpring"), dcpring.install():
        pass
    texts = [record.message for record in caplog.records]
    assert "RingWriter for FileSystemWriter" in texts[0] and "load as with torch" in texts[0]
    assert "uninstalled" in texts[1]


class Custom:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and self.value == other.value

    def __hash__(self) -> int:
        return self.value


def test_what_torch_has_saved_and_loads_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Objects of a program's classes, and tensors that are cast to ints: torch takes both."""
    versions.say_once.cache_clear()
    dcp.save({"o": Custom(3), "f": torch.tensor([1.0, 2.0])}, checkpoint_id=tmp_path, no_dist=True)
    wanted: dict[str, Any] = {"o": None, "f": torch.zeros(2, dtype=torch.int64)}
    with dcpring.install():
        dcp.load(wanted, checkpoint_id=tmp_path, no_dist=True)
        assert _load_state_dict_from_keys(checkpoint_id=tmp_path)["o"] == Custom(3)
    assert wanted["o"] == Custom(3) and wanted["f"].tolist() == [1, 2]
    (said,) = [record.message for record in caplog.records if "plain data" in record.message]
    assert "test_install.Custom" in said and "trusted=False" in said
    with dcpring.install(trusted=False), pytest.raises(dcp.CheckpointException, match="plain data and tensors"):
        dcp.load(wanted, checkpoint_id=tmp_path, no_dist=True)
    caplog.clear()
    with dcpring.install(trusted=True):
        dcp.load(wanted, checkpoint_id=tmp_path, no_dist=True)
    (said,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert "cast from torch.float32 to torch.int64, which can lose values: 'f'" in said


def _ranks(folder: str) -> list[str]:
    with dcpring.install():
        state = {"w": torch.arange(1000.0), "step": 3}
        dcp.save(state, checkpoint_id=f"{folder}/a")
        loaded = {"w": torch.zeros(1000), "step": 0}
        dcp.load(loaded, checkpoint_id=f"{folder}/a")
        assert torch.equal(loaded["w"], state["w"]) and loaded["step"] == 3  # type: ignore[arg-type]
    return sorted(path.name for path in Path(folder, "a").glob("*.distcp"))


def test_on_several_ranks(tmp_path: Path) -> None:
    assert is_ring(tmp_path / "a") if _distributed.run(2, _ranks, str(tmp_path)) else False


# ---- other processes ----

DAEMON = """
import os, sys, warnings, multiprocessing
warnings.simplefilter("ignore")
def main(folder):
    import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    dcp.async_save({"w": torch.ones(10)}, checkpoint_id=f"{folder}/background",
                   async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
    dist.destroy_process_group()
def child(folder):
    import torch, torch.distributed.checkpoint as dcp
    dcp.save({"w": torch.ones(10)}, checkpoint_id=f"{folder}/child", no_dist=True)
if __name__ == "__main__":
    import dcpring
    dcpring.install(writer_options={"progress": lambda progress: None})
    assert not any(name == "torch" or name.startswith("torch.") for name in sys.modules)
    process = multiprocessing.get_context("spawn").Process(target=child, args=(sys.argv[1],))
    process.start(); process.join(); assert process.exitcode == 0
    main(sys.argv[1])
"""


def test_processes_that_are_spawned_have_it(tmp_path: Path) -> None:
    """A child that torch is not loaded in yet, and the process of async_save, which makes its writer itself."""
    program = tmp_path / "program.py"
    program.write_text(DAEMON)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert is_ring(tmp_path / "child") and is_ring(tmp_path / "background")


def test_what_only_this_process_can_have_is_not_handed_on() -> None:
    from dcpring.integrations.install import portable

    given = {"writer": {"workers": 3, "progress": lambda progress: None}, "reader": {"trusted": "warn"}}
    assert portable(given) == {"writer": {"workers": 3}, "reader": {"trusted": "warn"}}


DEFERRED = """
import sys
import dcpring
assert not [name for name in sys.modules if name.split(".")[0] == "torch"], "torch was imported"
finders = len(sys.meta_path)
{first}
import torch.distributed.checkpoint as dcp
print(type(dcp.DefaultSavePlanner()).__name__, len(sys.meta_path) - finders, "exec_module" in vars(dcp.__loader__))
"""


@pytest.mark.parametrize(
    ("first", "variable", "expected"),
    [
        (
            "dcpring.install().uninstall(); dcpring.install(); from dcpring import RingWriter",
            "",
            "RingSavePlanner 0 False",
        ),
        ("dcpring.install(save_planner_options={'x': 1})", "", "DefaultSavePlanner 0 False"),
        ("", "1", "RingSavePlanner -1 False"),
    ],
)
def test_torch_is_waited_for(first: str, variable: str, expected: str) -> None:
    """Also where it is a module of dcpring that imports DCP."""
    environment = {**os.environ, "DCPRING_INSTALL": variable}
    command = [sys.executable, "-W", "ignore", "-c", DEFERRED.format(first=first)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.stdout.strip() == expected, done.stdout + done.stderr
    assert ("RingSavePlanner() has no argument" in done.stderr) == ("'x'" in first)


def test_the_finder_keeps_waiting_when_an_import_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from dcpring.integrations import install as room

    class Loader:
        def exec_module(self, module: types.ModuleType) -> None:
            raise ImportError("broken")

    called: list[int] = []
    loader = Loader()
    room._call_after_loading(loader, lambda: called.append(1))
    with pytest.raises(ImportError, match="broken"):
        loader.exec_module(types.ModuleType("m"))
    assert vars(loader) == {} and not called


# ---- dcpring run ----

PROGRAM = """
import sys
import torch.distributed.checkpoint as dcp
print(sys.argv[1:], sys.path[0], __name__, type(dcp.DefaultSavePlanner()).__name__)
sys.exit(7)
"""


@pytest.mark.parametrize("is_module", [False, True])
def test_run_is_as_python_is(is_module: bool, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    named = ["-m", "program"] if is_module else [str(folder / "program.py")]
    where = folder if is_module else tmp_path
    done = _prepared.run(["-m", "dcpring", "run", *named, "-m", "--help", "x"], cwd=where)
    assert done.returncode == 7, done.stderr
    assert done.stdout.strip() == f"['-m', '--help', 'x'] {folder} __main__ RingSavePlanner"


def test_run_says_what_is_wrong(tmp_path: Path) -> None:
    assert "there is no nothing.py" in _prepared.run(["-m", "dcpring", "run", "nothing.py"], cwd=tmp_path).stderr
    done = _prepared.run(["-m", "dcpring", "run", "--fast", "x.py"], cwd=tmp_path)
    assert done.returncode == 2 and "unrecognized arguments: --fast" in done.stderr
    assert "usage: dcpring run" in _prepared.run(["-m", "dcpring", "run", "--help"], cwd=tmp_path).stdout


BEHIND = """
import atexit
import torch
import torch.distributed.checkpoint as dcp

class Mine:
    pass

atexit.register(lambda: print(*dcp.FileSystemReader("saved").read_metadata().state_dict_metadata))
dcp.async_save({"tensor": torch.ones(1000, 1000), "object": Mine()}, checkpoint_id="saved", no_dist=True)
"""


@pytest.mark.parametrize("is_module", [False, True])
def test_what_goes_on_after_a_programs_last_line_finds_its_classes(is_module: bool, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(BEHIND)
    named = ["-m", "program"] if is_module else ["program.py"]
    command = [sys.executable, "-W", "ignore", "-m", "dcpring", "run", *named]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "tensor object\n", "")


SAYS = """
import os
os.chdir("/")
print(__name__, __package__, __spec__ and __spec__.name, __file__, type(__loader__).__name__, __builtins__)
print(sorted(globals()))
"""
PROGRAMS = {
    "what it is": ("program.py", SAYS),
    "an error": ("program.py", "def f():\n    raise KeyError('mine')\n\nf()"),
    "a text for an end": ("program.py", "import sys; sys.exit('goodbye')"),
    "a hook": ("program.py", "import sys; sys.excepthook = lambda *error: print(error[1]); raise KeyError('mine')"),
    "wrong syntax": ("program.py", "x = ("),
    "an encoding": ("program.py", "# -*- coding: latin-1 -*-\nprint(len('\u00e9'))"),
    "Ctrl-C": ("program.py", "raise KeyboardInterrupt"),
    "a folder": ("__main__.py", SAYS),
    "a folder without a program": ("other.py", SAYS),
}


@pytest.mark.parametrize("is_module", [False, True])
@pytest.mark.parametrize("what", PROGRAMS)
def test_a_program_is_what_python_makes_of_it(what: str, is_module: bool, tmp_path: Path) -> None:
    """With the same words where it fails."""
    name, text = PROGRAMS[what]
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / name).write_text(text)
    path = "there" if "folder" in what else f"there/{name}"
    named = ["-m", path.removesuffix(".py").replace("/", ".")] if is_module else [path]
    plain, ours = (
        subprocess.run([sys.executable, *command, *named], capture_output=True, text=True, cwd=tmp_path, check=False)
        for command in ([], ["-m", "dcpring", "run"])
    )
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
