"""What is recorded, and what must be found afterwards, whenever the machine dies.

A scenario saves versions 1, 2, ... of a state, one after the other, and marks when each begins and is done. After a
crash, one that was done or had begun must be there, bit for bit, and none that came before one that was done.
"""

from __future__ import annotations

import errno
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import _distributed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from crash.model import QUICK, Crashes, Run, Snapshot, Store, replayed, tree_of, understand
from crash.recording import Recorder, read_log
from fault._support import blank, equal
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcpring import (
    Checkpointer,
    CheckpointError,
    Replicated,
    RingHFReader,
    RingHFWriter,
    RingLoadPlanner,
    RingReader,
    RingSavePlanner,
    RingWriter,
    convert,
    saved_key_map,
    verify,
)
from dcpring.format.model_files import INDEX_NAME, MODEL_NAME
from dcpring.sources.contents import open_contents

StateDict = dict[str, Any]
NOTHING = 0
MOST_VERSIONS = 7
CRASHES = 8
"""Of each scenario that is gone on from after a crash."""

REFUSED = -1
"""Found where ranks that save on their own have not all saved yet: a load says so."""


class Wrong(Exception):
    """What is there after a crash is no checkpoint that was ever saved, and not clearly none."""


def state_of(version: int) -> StateDict:
    """A state of some pages: tensors of many bytes and of few, and objects."""
    made = torch.Generator().manual_seed(version)
    return {
        "weight": torch.randn(60, 50, generator=made),
        "half": torch.randn(300, generator=made).to(torch.bfloat16),
        "step": torch.tensor(version),
        "optimizer": {"lr": 0.1 * version, "betas": [0.9, 0.95]},
    }


def small_state_of(version: int) -> StateDict:
    """A state that makes three files, where each value gets one."""
    return {key: value for key, value in state_of(version).items() if key in ("weight", "step", "half")}


def large_state_of(version: int) -> StateDict:
    """A state of several blocks."""
    made = torch.Generator().manual_seed(version)
    return {f"weight.{n}": torch.randn(450 * (n + 1), 300, generator=made) for n in range(3)} | state_of(version)


def kept_state_of(version: int) -> StateDict:
    """A state of which a part stays as it is, and another until the fourth version."""
    made = torch.Generator().manual_seed(1 if version > 3 else 0)
    later = torch.nn.Parameter(torch.randn(80, 20, generator=made), requires_grad=False)
    frozen = torch.nn.Parameter(torch.full((2000,), 0.5), requires_grad=False)
    return {"frozen": frozen, "later": later} | state_of(version)


class KeepsLittle(RingWriter):
    """Links files however little is in them."""

    _least_kept_bytes = 1

    def __init__(self, path: Any, **options: Any) -> None:
        super().__init__(path, unchanged="link", **options)


class Scenario(ABC):
    """Attributes:
    name: of the scenario.
    versions: how many are saved.
    loses: whether all that is not durable may be lost; False where only processes die.
    initial: the version that is there before.
    """

    initial = NOTHING

    def __init__(self, name: str, versions: int = 2, loses: bool = True) -> None:
        self.name = name
        self.versions = versions
        self.loses = loses

    def prepare(self, root: Path) -> None:
        """Makes what is there, and durable, before anything is recorded."""
        root.mkdir()

    @abstractmethod
    def run(self, root: Path, log: Path) -> None:
        """Saves all versions, and records that."""

    @abstractmethod
    def find(self, root: Path) -> set[int]:
        """The versions of which something is there: one, unless ranks save on their own.

        Raises:
            Wrong: what is there is none of them.
        """

    def matters(self, path: str) -> bool:
        """Whether ``find`` may look at a path."""
        return True

    @abstractmethod
    def save_as(self, root: Path, number: int) -> None:
        """What the next run of the program does: it saves that version, over whatever a crash has left."""

    @abstractmethod
    def leftovers(self, root: Path) -> set[str]:
        """Names that nobody needs after ``save_as``."""


@contextmanager
def version(recorder: Recorder, number: int) -> Iterator[None]:
    recorder.mark(f"begin {number}")
    yield
    recorder.mark(f"done {number}")


def record(scenario: Scenario, folder: Path) -> Run:
    """Runs a scenario, and checks that the recording tells all that it did."""
    root, log = folder / "root", folder / "log"
    folder.mkdir(parents=True, exist_ok=True)
    scenario.prepare(root)
    before = Snapshot(root)
    scenario.run(root, log)
    run = understand(before, read_log(log))
    store = Store(folder / "compared")
    said, real = replayed(run, store), tree_of(root, store)
    if said != real:
        differing = sorted(path for path in said.keys() | real.keys() if said.get(path, "-") != real.get(path, "-"))
        raise AssertionError(f"{scenario.name}: the recording does not tell what was done to {differing}")
    return run


# ---- one checkpoint, saved again and again ----


def same_version(loaded: StateDict, states: Callable[[int], StateDict]) -> int:
    for number in range(1, MOST_VERSIONS + 1):
        if equal(loaded, states(number)):
            return number
    raise Wrong("what was loaded was never saved")


def absence_or_wrong(error: BaseException) -> int:
    """A checkpoint that is not there says so; whatever else keeps one from loading is wrong."""
    reasons = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    for reason in reasons:  # DCP makes an AssertionError of it that quotes it
        if not any(
            words in str(reason)
            for words in ("does not exist", "is no checkpoint: there is no", "holds no safetensors", ", and no index")
        ):
            raise Wrong(f"{type(reason).__name__}: {reason}") from error
    return NOTHING


def names_not_needed(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()} - {".metadata", *open_contents(path).files}


class Saves(Scenario):
    """One process saves to one directory.

    Args:
        options: for ``RingWriter``; one dict for all versions, or a function of the version.
        folder: of the checkpoint, below the root.
        states: the state of a version.
        planner: makes the save planner.
        before: makes what is there before the first version.
        faulty: versions whose save first fails, by the system call that does not work.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] = {},  # noqa: B006
        *,
        versions: int = 2,
        folder: str = "checkpoint",
        states: Callable[[int], StateDict] = state_of,
        planner: Callable[[], Any] = lambda: None,
        before: Callable[[Path], None] | None = None,
        faulty: Mapping[int, str] = {},
        writer: Callable[..., Any] = RingWriter,
        loses: bool = True,
        asynchronous: bool = False,
    ) -> None:
        super().__init__(name, versions, loses)
        self._options = options if callable(options) else lambda _: options
        self._folder = folder
        self._states = states
        self._planner = planner
        self._before = before
        self._faulty = faulty
        self._writer = writer
        self._asynchronous = asynchronous

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        if self._before is not None:
            self._before(root / self._folder)
            self.initial = 1

    def run(self, root: Path, log: Path) -> None:
        with Recorder(root, log) as recorder:
            for number in range(1, self.versions + 1):
                if self._before is None or number > 1:
                    self._save_marked(recorder, root / self._folder, number)

    def _save_marked(self, recorder: Recorder, path: Path, number: int) -> None:
        with version(recorder, number):
            if number in self._faulty:
                with recorder.failing(self._faulty[number], errno.EIO):
                    try:
                        self._save(path, number)
                    except CheckpointException:
                        pass
                    else:
                        raise AssertionError(f"a save with a failing {self._faulty[number]} has succeeded")
            self._save(path, number)

    def _save(self, path: Path, number: int) -> None:
        writer = self._writer(path, **self._options(number))
        if self._asynchronous:
            dcp.async_save(self._states(number), storage_writer=writer, planner=self._planner()).result()
        else:
            dcp.save(self._states(number), storage_writer=writer, planner=self._planner(), no_dist=True)

    def find(self, root: Path) -> set[int]:
        path = root / self._folder
        state = blank(self._states(1))
        try:
            table = saved_key_map(path) if (path / ".metadata").exists() else None
            reader = RingReader(path, key_map=None if table is None else table.inverse())
            dcp.load(state, storage_reader=reader, planner=RingLoadPlanner(), no_dist=True)
        except (Exception, CheckpointException) as error:
            return {absence_or_wrong(error)}
        found = same_version(state, self._states)
        report = verify(path)
        if not report.ok:
            raise Wrong(f"verify says: {report}")
        return {found}

    def save_as(self, root: Path, number: int) -> None:
        self._save(root / self._folder, number)

    def leftovers(self, root: Path) -> set[str]:
        path = root / self._folder
        if self._options(self.versions).get("keep_superseded"):
            return set()
        return names_not_needed(path) - ({".dcpring.json"} if saved_key_map(path) is not None else set())


class SavesByTorchsNames(Saves):
    """Files are called as torch's as long as there is no checkpoint, and as others of ours over one."""

    def __init__(self, name: str) -> None:
        super().__init__(name, writer=self._writer_of)

    @staticmethod
    def _writer_of(path: Path) -> RingWriter:
        return RingWriter(path, file_names="unique" if (path / ".metadata").exists() else "torch")


class StockSaves(Saves):
    """What PyTorch's own writer does, to see that its known faults are found."""

    def find(self, root: Path) -> set[int]:
        state = blank(self._states(1))
        try:
            dcp.load(state, storage_reader=FileSystemReader(root / self._folder), no_dist=True)
        except (Exception, CheckpointException) as error:
            if isinstance(error, CheckpointException) and not (root / self._folder / ".metadata").exists():
                return {NOTHING}
            raise Wrong(f"{type(error).__name__}") from error
        return {same_version(state, self._states)}


def saved_by_stock(path: Path) -> None:
    dcp.save(state_of(1), storage_writer=FileSystemWriter(path), no_dist=True)


class ModelSaves(Saves):
    """One process saves a model as safetensors, in one file or in several."""

    def __init__(self, name: str, options: Callable[[int], Mapping[str, Any]], **others: Any) -> None:
        super().__init__(
            name, options, folder="model", states=small_state_of, planner=RingSavePlanner, writer=RingHFWriter, **others
        )

    def find(self, root: Path) -> set[int]:
        state = blank(small_state_of(1))
        try:
            dcp.load(state, storage_reader=RingHFReader(root / "model"), planner=RingLoadPlanner(), no_dist=True)
        except (Exception, CheckpointException) as error:
            return {absence_or_wrong(error)}
        return {same_version(state, small_state_of)}

    def leftovers(self, root: Path) -> set[str]:
        path = root / "model"
        index = path / "model.safetensors.index.json"
        needed = {"model.safetensors"}
        if not (path / "model.safetensors").exists() and index.exists():
            needed = {index.name, *json.loads(index.read_text())["weight_map"].values()}
        return {entry.name for entry in path.iterdir()} - needed


def _in_several_files(*numbers: int) -> Callable[[int], Mapping[str, Any]]:
    """In versions of these numbers."""
    return lambda number: {"max_shard_bytes": 700} if number in numbers else {}


class SavesAfterCrash(Scenario):
    """A save in what the crash of another has left; and then the machine dies again.

    Args:
        before: the scenario that ended in a crash, of one process.
        number: chooses the crash.
    """

    def __init__(self, before: Scenario, number: int, seed: int | str) -> None:
        super().__init__(f"{before.name}, after crash {number}", before.versions + 1)
        self._before = before
        self._number = number
        self._seed = seed

    def prepare(self, root: Path) -> None:
        """Leaves what the crash has left, and notes which version that is."""
        side = root.with_name("before")
        run = record(self._before, side)
        chance = random.Random(f"{self._seed} {self.name}")
        crashes = Crashes(run, Store(side / "contents"), QUICK, chance, self._before.loses)
        states = [state for time in crashes.times() for state in crashes.at(time)]
        crashes.store.make(chance.choice(states).tree, root, may_change=True)
        (self.initial,) = self._before.find(root)

    def run(self, root: Path, log: Path) -> None:
        with Recorder(root, log) as recorder, version(recorder, self.versions):
            self._before.save_as(root, self.versions)

    def find(self, root: Path) -> set[int]:
        return self._before.find(root)

    def save_as(self, root: Path, number: int) -> None:
        self._before.save_as(root, number)

    def leftovers(self, root: Path) -> set[str]:
        return self._before.leftovers(root)

    def matters(self, path: str) -> bool:
        return self._before.matters(path)


# ---- several ranks ----


def ranks_state(version: int, rank: int, is_whole: bool) -> StateDict:
    made = torch.Generator().manual_seed(version)
    sharded = torch.randn(41, 60, generator=made)
    state: StateDict = {"shared": torch.randn(900, generator=made), "lr": 0.1 * version}
    if is_whole:
        owners = range(RANKS)
        state["sharded"] = sharded
    else:
        owners = range(rank, rank + 1)
        state["sharded"] = distribute_tensor(sharded, init_device_mesh("cpu", (RANKS,)), [Shard(0)])
    return state | {f"own.{owner}": torch.full((500,), float(10 * version + owner)) for owner in owners}


RANKS = 3


def _save_on_ranks(root: Path, log: Path, versions: int, planner: type | None, options: dict[str, Any]) -> None:
    with Recorder(root, log) as recorder:
        for number in range(1, versions + 1):
            state = ranks_state(number, dist.get_rank(), False)
            dist.barrier()
            with version(recorder, number) if dist.get_rank() == 0 else nullcontext():
                writer = RingWriter(root / "checkpoint", **options)
                dcp.save(state, storage_writer=writer, planner=planner() if planner else None)
            dist.barrier()


class RanksSave(Scenario):
    """Several processes save one checkpoint."""

    def __init__(self, name: str, planner: type | None, **options: Any) -> None:
        super().__init__(name)
        self._planner = planner
        self._options = options

    def run(self, root: Path, log: Path) -> None:
        _distributed.run(RANKS, _save_on_ranks, root, log, self.versions, self._planner, self._options)

    def find(self, root: Path) -> set[int]:
        state = blank(ranks_state(1, 0, True))
        try:
            dcp.load(state, storage_reader=RingReader(root / "checkpoint"), planner=RingLoadPlanner(), no_dist=True)
        except (Exception, CheckpointException) as error:
            return {absence_or_wrong(error)}
        return {same_version(state, lambda number: ranks_state(number, 0, True))}

    def save_as(self, root: Path, number: int) -> None:
        """On one rank."""
        dcp.save(ranks_state(number, 0, True), storage_writer=RingWriter(root / "checkpoint"), no_dist=True)

    def leftovers(self, root: Path) -> set[str]:
        return names_not_needed(root / "checkpoint")


def _own_state(number: int, rank: int) -> StateDict:
    return {"own": torch.full((700,), float(10 * number + rank)), "lr": 0.1 * number}


def _save_alone(root: Path, log: Path, versions: int, globally: tuple[int, ...]) -> None:
    rank, path = dist.get_rank(), root / "checkpoint"
    with Recorder(root, log) as recorder:
        for number in range(1, versions + 1):
            dist.barrier()
            if rank == 0:
                recorder.mark(f"begin {number}")
            dist.barrier()
            if number in globally:
                state = {f"{key}.{rank}": value for key, value in _own_state(number, rank).items()}
                dcp.save(state, storage_writer=RingWriter(path))
            else:
                dcp.save(_own_state(number, rank), storage_writer=RingWriter(path), use_collectives=False)
            dist.barrier()
            if rank == 0:
                recorder.mark(f"done {number}")


class RanksSaveAlone(Scenario):
    """Two processes save without collectives: each commits its own part.

    Args:
        globally: versions that are saved with collectives all the same.
    """

    def __init__(self, name: str, versions: int, globally: tuple[int, ...] = ()) -> None:
        super().__init__(name, versions)
        self._globally = globally

    def run(self, root: Path, log: Path) -> None:
        _distributed.run(2, _save_alone, root, log, self.versions, self._globally)

    def find(self, root: Path) -> set[int]:
        """As DCP: the metadata of all, and where that fails, of each rank."""
        path = root / "checkpoint"
        whole = {f"{key}.{rank}": value for rank in (0, 1) for key, value in _own_state(1, rank).items()}
        state = blank(whole)
        try:
            RingReader(path).read_metadata()
        except FileNotFoundError as error:
            if not list(path.glob("__*.metadata")):
                return {absence_or_wrong(error)}
        except CheckpointError as error:
            if "is older than the metadata that ranks" not in str(error):
                raise Wrong(str(error)) from error
        else:
            dcp.load(state, storage_reader=RingReader(path), no_dist=True)
            return {same_version(state, self._global_state)}
        return {self._find_of_rank(path, rank) for rank in (0, 1)}

    @staticmethod
    def _global_state(number: int) -> StateDict:
        return {f"{key}.{rank}": value for rank in (0, 1) for key, value in _own_state(number, rank).items()}

    def _find_of_rank(self, path: Path, rank: int) -> int:
        try:
            # With torch before 2.13 what was wrong is raised when the metadata is used.
            _ = RingReader(path).read_metadata(rank=rank).state_dict_metadata
        except AssertionError as error:
            texts = "was interrupted", "which cannot be loaded", "No such file or directory"
            if not any(text in str(error) for text in texts):
                raise Wrong(str(error)) from error
            return REFUSED
        except CheckpointError as error:
            if "was interrupted" not in str(error) and "which cannot be loaded" not in str(error):
                raise Wrong(str(error)) from error
            return REFUSED
        except FileNotFoundError:
            return REFUSED
        contents = open_contents(path, rank=rank)
        state = {"own": contents.read("own"), "lr": _float_of(contents.read_object("lr"))}
        return same_version(state, lambda number: _own_state(number, rank))

    def save_as(self, root: Path, number: int) -> None:
        """With collectives, on one rank."""
        dcp.save(self._global_state(number), storage_writer=RingWriter(root / "checkpoint"), no_dist=True)

    def leftovers(self, root: Path) -> set[str]:
        return names_not_needed(root / "checkpoint")


def _float_of(stream: Any) -> float:
    return float(torch.load(stream, weights_only=True))


# ---- Checkpointer ----


class Counter:
    """A component whose state is some pages, of which some are different for each version."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def state_dict(self) -> StateDict:
        return kept_state_of(self.number)

    def load_state_dict(self, state: StateDict) -> None:
        found = [number for number in range(1, MOST_VERSIONS + 1) if equal(state, kept_state_of(number))]
        if not found:
            raise Wrong("what was loaded was never saved")
        self.number = found[0]


def _checkpointer(root: Path, counter: Counter, options: Mapping[str, Any]) -> Checkpointer:
    return Checkpointer(root / "folder", {"counter": Replicated(counter)}, **options)


def _run_checkpointer(root: Path, log: Path, steps: list[int], blocking: bool, options: Mapping[str, Any]) -> None:
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    counter = Counter()
    links = mock.patch.object(RingWriter, "_least_kept_bytes", 1)  # however little is in a file
    with links, Recorder(root, log) as recorder, _checkpointer(root, counter, options) as checkpointer:
        for number, step in enumerate(steps, 1):
            if is_first:
                recorder.mark(f"begin {number}")
            counter.number = number
            checkpointer.save(step, blocking=blocking)
            if not blocking:
                checkpointer.wait()
            if is_first:
                recorder.mark(f"done {number}")


class Checkpoints(Scenario):
    """A Checkpointer saves steps, and removes old ones.

    Args:
        steps: that are saved, one for each version.
        ranks: how many processes.
        options: for ``Checkpointer``.
    """

    def __init__(self, name: str, steps: list[int], blocking: bool = True, ranks: int = 1, **options: Any) -> None:
        super().__init__(name, len(steps))
        self._steps = steps
        self._blocking = blocking
        self._ranks = ranks
        self._options = options

    def run(self, root: Path, log: Path) -> None:
        arguments = (root, log, self._steps, self._blocking, self._options)
        if self._ranks == 1:
            _run_checkpointer(*arguments)
        else:
            _distributed.run(self._ranks, _run_checkpointer, *arguments)

    def find(self, root: Path) -> set[int]:
        """What ``latest()`` gives; every other step that is listed must load, too."""
        counter = Counter()
        with _checkpointer(root, counter, self._options) as checkpointer:
            latest, steps = checkpointer.latest(), checkpointer.steps()
            found: dict[int, int] = {}
            for step in steps:
                try:
                    checkpointer.load(step)
                except CheckpointError as error:
                    raise Wrong(f"step {step} of {steps} does not load: {error}") from error
                found[step] = counter.number
                if self._step(counter.number) != step:
                    raise Wrong(f"step {step} holds what was saved as step {self._step(counter.number)}")
            return {NOTHING if latest is None else found[latest]}

    def _step(self, number: int) -> int:
        return self._steps[number - 1] if number <= len(self._steps) else self._steps[-1] + number

    def save_as(self, root: Path, number: int) -> None:
        with _checkpointer(root, Counter(number), self._options) as checkpointer:
            checkpointer.save(self._step(number))

    def leftovers(self, root: Path) -> set[str]:
        with _checkpointer(root, Counter(), self._options) as checkpointer:
            kept = {f"step-{step}" for step in checkpointer.steps()}
        return {entry.name for entry in (root / "folder").iterdir()} - kept


# ---- convert ----


class Conversions(Scenario):
    """``convert``, to a target that is not there, and then over it.

    Args:
        target: its name.
        options: for ``convert``.
        can_exchange: whether the file system can let two names change places.
    """

    def __init__(self, name: str, target: str, can_exchange: bool = True, **options: Any) -> None:
        super().__init__(name)
        self._target = target
        self._can_exchange = can_exchange
        self._options = options

    def _state(self, number: int) -> StateDict:
        return {key: value for key, value in state_of(number).items() if isinstance(value, torch.Tensor)}

    def run(self, root: Path, log: Path) -> None:
        sources = [log.with_name(f"source-{number}.pt") for number in range(1, self.versions + 1)]
        for number, source in enumerate(sources, 1):
            torch.save(self._state(number), source)
        with Recorder(root, log) as recorder:
            for number, source in enumerate(sources, 1):
                refused = recorder.failing("exchange", errno.EINVAL, sticky=True)
                with nullcontext() if self._can_exchange else refused, version(recorder, number):
                    self._convert(source, root)

    def _convert(self, source: Path, root: Path) -> None:
        convert(source, root / self._target, overwrite=True, **self._options)

    def find(self, root: Path) -> set[int]:
        if not (root / self._target).exists():
            return {NOTHING}
        back = root.with_name(f"{root.name}.pt")
        try:
            convert(root / self._target, back)
            found = torch.load(back, weights_only=True)
        except (OSError, CheckpointError) as error:
            raise Wrong(f"{type(error).__name__}: {error}") from error
        finally:
            back.unlink(missing_ok=True)
        return {same_version(found, self._state)}

    def matters(self, path: str) -> bool:
        return path.partition("/")[0] == self._target

    def save_as(self, root: Path, number: int) -> None:
        source = root.with_name(f"{root.name}.source.pt")
        torch.save(self._state(number), source)
        self._convert(source, root)
        source.unlink()

    def leftovers(self, root: Path) -> set[str]:
        return {entry.name for entry in root.iterdir()} - {self._target}


class ConversionsIntoAFolder(Conversions):
    """``convert`` to safetensors in a model's folder, whose configuration stays."""

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        (root / self._target).mkdir()
        (root / self._target / "config.json").write_text("{}")

    def find(self, root: Path) -> set[int]:
        if not any((root / self._target / name).exists() for name in (MODEL_NAME, INDEX_NAME)):
            return {NOTHING}
        return super().find(root)

    def leftovers(self, root: Path) -> set[str]:
        folder = root / self._target
        known = {"config.json", INDEX_NAME, *(file.name for file in folder.glob("model*"))}
        return super().leftovers(root) | {entry.name for entry in folder.iterdir()} - known


# ---- all of them ----

_ONE_EACH = {"single_file_per_rank": False}
"""A file for each tensor: then it is linked, however small."""

_THREADS = {"engine": "threads", "direct": False}
_URING = {"engine": "uring", "direct": True}


def _by_version(**names: str) -> Callable[[int], dict[str, Any]]:
    """Options with a key map for some versions."""
    return lambda number: {"key_map": {"weight": names[f"v{number}"]}} if f"v{number}" in names else {}


def quick(seed: int | str) -> list[Scenario]:
    """One of each kind."""
    return [
        Saves("save", _URING, folder="new/folder/checkpoint", planner=RingSavePlanner),
        Saves("save in several files", _THREADS | {"single_file_per_rank": False}, states=small_state_of),
        Saves("save over stock's", before=saved_by_stock),
        SavesByTorchsNames("save by torch's names"),
        Saves("save with key maps", _by_version(v1="a", v2="b"), versions=3, planner=RingSavePlanner),
        Saves("save that keeps the superseded", {"keep_superseded": True}, versions=3),
        Saves("save after one that failed", faulty={1: "fdatasync", 2: "rename"}),
        Saves("save without sync, killed", _THREADS | {"sync_files": False}, loses=False),
        ModelSaves("save of a model", _in_several_files(2, 3), versions=4),
        Saves("save that links", writer=KeepsLittle, versions=3, states=kept_state_of, planner=RingSavePlanner),
        RanksSave("ranks save", RingSavePlanner),
        RanksSaveAlone("ranks save without collectives", 2),
        Checkpoints("checkpointer that keeps one", [1, 2, 3], keep_last=1),
        Checkpoints("checkpointer that links", [1, 2, 3], keep_last=1, unchanged="link"),
        Conversions("convert to dcp", "target", files=2),
        Conversions("convert to a file", "target.pt"),
        ConversionsIntoAFolder("convert into a folder", "target", to="safetensors", shard_bytes=1 << 10),
        *(SavesAfterCrash(Saves("save", planner=RingSavePlanner), number, seed) for number in range(3)),
    ]


def every(seed: int | str) -> list[Scenario]:
    """All."""
    interrupted = [
        Saves("save", _URING, planner=RingSavePlanner),
        Saves("save in several files", _THREADS | {"single_file_per_rank": False}, states=small_state_of),
        Saves("save with key maps", _by_version(v1="a", v2="b", v3="c"), planner=RingSavePlanner),
        Checkpoints("checkpointer that keeps one", [1, 2, 3], keep_last=1),
        Conversions("convert to dcp", "target", files=2),
        Conversions("convert to a file", "target.pt"),
        ModelSaves("save of a model", _in_several_files(2, 3), versions=4),
    ]
    return [
        *quick(seed),
        *(SavesAfterCrash(before, number, seed) for before in interrupted for number in range(CRASHES)),
        Saves("save by threads", _THREADS, versions=3),
        Saves("save by threads, direct", _THREADS | {"direct": True}, versions=3),
        Saves("save by io_uring, buffered", _URING | {"direct": False}, versions=3),
        Saves("save of several blocks", _URING | {"block_size_bytes": 1 << 20, "workers": 3}, states=large_state_of),
        Saves("save of several blocks by threads", _THREADS | {"block_size_bytes": 1 << 20}, states=large_state_of),
        Saves("save with a key map that goes", _by_version(v1="a"), versions=3),
        Saves("save in the background", asynchronous=True),
        Saves("save that links each tensor", _ONE_EACH, writer=KeepsLittle, versions=5, states=kept_state_of),
        Saves(
            "save that links after one that failed",
            faulty={2: "fsync", 3: "rename", 4: "fdatasync"},
            versions=4,
            writer=KeepsLittle,
            states=kept_state_of,
        ),
        Checkpoints("checkpointer that links again and again", [1, 2, 3, 4, 5], keep_last=2, unchanged="link"),
        Checkpoints("checkpointer that links, on two ranks", [1, 2, 3, 4], ranks=2, keep_last=2, unchanged="link"),
        Saves("save after one that failed early", faulty={1: "mkdir", 2: "open_below"}),
        Saves("save after one that failed late", faulty={1: "fsync", 2: "fsync"}),
        ModelSaves("save of a model after one that failed", _in_several_files(1, 4), versions=4, faulty={2: "rename"}),
        ModelSaves("save of a model in files alone", _in_several_files(1, 2, 3), versions=3, faulty={3: "fdatasync"}),
        RanksSave("ranks save by stock's planner", None, single_file_per_rank=False),
        RanksSave("ranks save with io_uring", RingSavePlanner, **_URING),
        RanksSaveAlone("ranks save without collectives, between others", 4, globally=(2, 4)),
        Checkpoints("checkpointer in the background", [1, 2, 3, 4], False, keep_last=2),
        Checkpoints("checkpointer that keeps every other", [1, 2, 3, 4, 5], keep_last=1, keep_every=2),
        Checkpoints("checkpointer that saves a step again", [1, 2, 2], keep_last=1),
        Checkpoints("checkpointer of two ranks", [1, 2, 3], ranks=2, keep_last=1),
        Checkpoints("checkpointer of two ranks in the background", [1, 2, 3], False, ranks=2, keep_last=1),
        Conversions("convert to safetensors", "target.safetensors"),
        Conversions("convert to shards", "target", to="safetensors", shard_bytes=8000),
        Conversions("convert to a file, without exchange", "target.pt", can_exchange=False),
    ]
