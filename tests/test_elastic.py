"""Every sample of an epoch is seen exactly once, whatever ranks come and go, whoever loads the data."""

from __future__ import annotations

import pickle
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import _distributed
import pytest
import torch
import torch.distributed as dist
from _resume import error_of
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from dcpring import (
    Checkpointer,
    CheckpointError,
    Elastic,
    ElasticDataset,
    ElasticLoader,
    ElasticSampler,
    PerRank,
)
from dcpring.data import Permutation, distributed_order, torchdata_batches

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's

SIZE = 211
"""A prime: no number of ranks or batch size divides it."""

WORLDS = (4, 2, 4, 3, 8)
STEPS_PER_LEG = 3


class Squares(Dataset[tuple[int, int]]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


class Case(NamedTuple):
    """A way to load data."""

    loader: type[Any]
    iterable: bool = False
    workers: int = 0
    shuffle: bool = True
    persistent: bool = False
    batch_size: int | None = 3

    def make(self, rank: int | None = None, world_size: int | None = None) -> ElasticLoader:
        sampler = ElasticSampler(SIZE, seed=5, shuffle=self.shuffle, rank=rank, world_size=world_size)
        data: Any = ElasticDataset(Squares(), sampler, self.batch_size) if self.iterable else Squares()
        options = {} if self.iterable else {"sampler": sampler}
        if self.workers:
            options["multiprocessing_context"] = "fork"
        return ElasticLoader(
            self.loader(
                data,
                batch_size=self.batch_size,
                num_workers=self.workers,
                persistent_workers=self.persistent,
                **options,
            )
        )


CASES = {
    "torch": Case(DataLoader),
    "torch-in-order": Case(DataLoader, shuffle=False),
    "torch-workers": Case(DataLoader, workers=2),
    "torch-iterable-workers": Case(DataLoader, iterable=True, workers=2, persistent=True),
    "torch-unbatched": Case(DataLoader, batch_size=None),
    "torchdata": Case(StatefulDataLoader),
    "torchdata-workers": Case(StatefulDataLoader, workers=2),
    "torchdata-iterable-workers": Case(StatefulDataLoader, iterable=True, workers=2),
}


def indices(batch: Any) -> list[int]:
    found = torch.as_tensor(batch[0]).reshape(-1).tolist()
    assert torch.as_tensor(batch[1]).reshape(-1).tolist() == [index * index for index in found]
    return found


def one_leg(folder: Path, step: int, is_last: bool) -> dict[str, list[int]]:
    """Goes on from the last checkpoint, sees a few batches (or all that are left), and saves."""
    seen: dict[str, list[int]] = {}
    for name, case in CASES.items():
        loader = case.make()
        with Checkpointer(folder / name, {"dataloader": loader}) as checkpointer:
            report = checkpointer.load(missing_ok=True)
            assert (report.step or 0) == step
            seen[name] = []
            batches = iter(loader)
            for _ in range(loader.batches_left if is_last else STEPS_PER_LEG):
                seen[name] += indices(next(batches))
            assert not is_last or next(batches, None) is None
            checkpointer.save(step + 1)
            del batches
    return seen


def test_ranks_come_and_go(tmp_path: Path) -> None:
    seen: dict[str, list[int]] = {name: [] for name in CASES}
    for leg, world in enumerate(WORLDS):
        for found in _distributed.run(world, one_leg, tmp_path, leg, leg == len(WORLDS) - 1):
            for name in CASES:
                seen[name] += found[name]
    for name in CASES:
        assert sorted(seen[name]) == list(range(SIZE)), name
    assert set(pairwise(WORLDS)) >= {(4, 2), (2, 4), (4, 3), (3, 8)}


def epochs(world: int, case: Case, count: int) -> list[list[int]]:
    """What all ranks see of some epochs, in this process."""
    loaders = [case.make(rank, world) for rank in range(world)]
    return [[index for loader in loaders for batch in loader for index in indices(batch)] for _ in range(count)]


@pytest.mark.parametrize("name", CASES)
def test_epochs_follow_each_other(name: str) -> None:
    case = CASES[name]
    first, second = epochs(3, case, 2)
    assert sorted(first) == sorted(second) == list(range(SIZE))
    assert (first != second) == case.shuffle
    assert (first != sorted(first)) or not case.shuffle


def test_the_order_does_not_depend_on_workers_or_ranks() -> None:
    orders = set()
    for name in ("torch", "torch-workers", "torch-iterable-workers", "torchdata-iterable-workers"):
        orders.add(tuple(index for batch in CASES[name].make(0, 1) for index in indices(batch)))
    alone = orders.pop()
    assert not orders
    dealt = [list(ElasticSampler(SIZE, seed=5, rank=rank, world_size=4)) for rank in range(4)]
    assert all(dealt[rank] == list(alone[rank::4]) for rank in range(4))


@pytest.mark.parametrize(
    ("remainder", "counts"), (("repeat", [3, 3, 3, 3]), ("drop", [2, 2, 2, 2]), ("uneven", [3, 3, 2, 2]))
)
def test_remainder(remainder: Any, counts: list[int]) -> None:
    samplers = [ElasticSampler(10, remainder=remainder, rank=rank, world_size=4) for rank in range(4)]
    dealt = [list(sampler) for sampler in samplers]
    assert [len(each) for each in dealt] == [len(sampler) for sampler in samplers] == counts
    seen = Counter(index for each in dealt for index in each)
    assert len(seen) == min(10, sum(counts))
    assert sum(seen.values()) == sum(counts)


@pytest.mark.parametrize("size", (1, 2, 3, 7, 64, 1000, 4097, 100_003))
def test_permutation(size: int) -> None:
    found = Permutation(size, key=11).take(torch.arange(size))
    assert torch.equal(found.sort().values, torch.arange(size))
    if size > 64:
        other = Permutation(size, key=12).take(torch.arange(size))
        fixed, shared = int((found == torch.arange(size)).sum()), int((found == other).sum())
        # Of a random permutation one element stays in place on average; so it is with two of them.
        assert fixed < 10 and shared < 10
        steps = (found[1:] - found[:-1]).double()
        spread = torch.corrcoef(torch.stack([found[1:].double(), found[:-1].double()]))[0, 1]
        assert abs(float(spread)) < 5 / size**0.5
        assert float((steps > 0).double().mean()) == pytest.approx(0.5, abs=5 / size**0.5)


def test_permutation_starts_anywhere_in_anything() -> None:
    size = 1 << 61
    found = Permutation(size, key=3).take(torch.tensor([0, 1, size - 1]))
    assert len(set(found.tolist())) == 3
    assert bool(((found >= 0) & (found < size)).all())


def test_the_order_is_part_of_the_format() -> None:
    """Progress that was saved refers to it: a change would make samples repeat or go missing."""
    assert Permutation(1000, key=(5 << 32) + 2).take(torch.arange(6)).tolist() == [472, 897, 727, 9, 130, 561]
    loader = Case(DataLoader).make(0, 1)
    loader.load_state_dict({"epoch": 2, "consumed": 100})
    assert indices(next(iter(loader))) == Permutation(SIZE, (5 << 32) + 2).take(torch.arange(100, 103)).tolist()


# ---- progress ----


def test_batches_that_workers_read_ahead_are_not_used() -> None:
    loader = Case(DataLoader, workers=2).make(0, 1)
    batches = iter(loader)
    next(batches)
    assert loader.state_dict()["consumed"] == 3


def test_an_iterator_goes_on_where_the_last_stopped() -> None:
    loader = Case(DataLoader).make(0, 1)
    first = [indices(batch) for _, batch in zip(range(4), loader, strict=False)]
    rest = [indices(batch) for batch in loader]
    assert sorted(index for batch in first + rest for index in batch) == list(range(SIZE))
    assert (loader.epoch, loader.consumed) == (1, 0)
    loader.set_epoch(1)
    next(iter(loader))
    loader.set_epoch(1)
    assert loader.consumed == 3
    batches = iter(loader)
    next(batches)
    assert loader.batches_left == -(-(SIZE - 6) // 3)
    assert len(loader) == -(-SIZE // 3)
    next(batches)
    assert loader.consumed == 9, "to ask for the length changes nothing"
    loader.set_epoch(4)
    assert (loader.epoch, loader.consumed) == (4, 0)


def unequal_progress(folder: Path) -> str:
    loader = Case(DataLoader).make()
    with Checkpointer(folder, {"dataloader": loader}) as checkpointer:
        batches = iter(loader)
        for _ in range(1 + (dist.get_rank() == 2)):
            next(batches)
        return error_of(checkpointer.save, 1)


def test_ranks_at_different_batches(tmp_path: Path) -> None:
    for message in _distributed.run(4, unequal_progress, tmp_path):
        assert "ranks 0-1, 3 were given fewer batches (epoch 0, 12 samples)" in message
        assert "(epoch 0, 24 samples)" in message
    assert not list(tmp_path.glob("step-*"))


def test_a_rank_that_ran_out_may_lag() -> None:
    loaders = [
        ElasticLoader(DataLoader(Squares(), batch_size=2, sampler=ElasticSampler(SIZE, rank=rank, world_size=4)))
        for rank in range(4)
    ]
    for loader in loaders:
        loader.load_state_dict({"epoch": 0, "consumed": SIZE - 10})
    batches = [iter(loader) for loader in loaders]
    for each in batches:
        next(each)
    states = [loader.state_dict() for loader in loaders]
    assert [state["ran_out"] for state in states] == [False, False, True, True]
    next(batches[0])
    next(batches[1])
    combined = loaders[0].combine_state_dicts([loader.state_dict() for loader in loaders])
    assert (combined["epoch"], combined["consumed"]) == (0, SIZE)
    assert "ran_out" not in combined, "it is a rank's, and a load would be said to have lost it"


EARLY = ElasticSampler(SIZE, seed=5)
"""Made before there is a process group, as for a trainer that makes one itself."""


def dealt_early(workers: int) -> list[int]:
    loader = ElasticLoader(DataLoader(ElasticDataset(Squares(), EARLY, 3), batch_size=3, num_workers=workers))
    return [int(index) for indices, _ in loader for index in indices]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_of_before_the_group_deals_to_its_ranks(workers: int) -> None:
    dealt = _distributed.run(2, dealt_early, workers)
    assert Counter(index for each in dealt for index in each) == Counter(range(SIZE))


@pytest.mark.parametrize(
    ("state", "message"),
    (
        ({"epoch": 0, "consumed": 5, "size": 100}, "epoch of 100 samples, the dataset now has 211"),
        ({"epoch": 0, "consumed": 500}, "that cannot be"),
        ({"epoch": -1, "consumed": 5}, "that cannot be"),
        ({"epoch": 0, "consumed": 5, "own_order": True}, "order="),
        ({"last": 3}, "no epoch and no consumed"),
    ),
)
def test_progress_that_does_not_fit(state: dict[str, Any], message: str) -> None:
    loader = Case(DataLoader).make(0, 1)
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(CheckpointError, match=message):
        loader.load_state_dict(state)
    assert loader.state_dict() == before


@pytest.mark.parametrize(
    ("make", "message"),
    (
        (lambda: ElasticSampler(0), "size=0"),
        (lambda: ElasticSampler(5, rank=0, world_size=0), "world_size=0"),
        (lambda: ElasticSampler(5, rank=2, world_size=2), "rank=2"),
        (lambda: ElasticSampler(5, remainder="pad"), "remainder='pad'"),  # type: ignore[arg-type]
        (lambda: ElasticLoader(DataLoader(Squares(), batch_size=2)), r"sampler=ElasticSampler\(...\), not Sequential"),
        (
            lambda: ElasticLoader(DataLoader(Squares(), 2, sampler=ElasticSampler(SIZE), drop_last=True)),
            'remainder="drop"',
        ),
        (
            lambda: ElasticLoader(DataLoader(ElasticDataset(Squares(), ElasticSampler(SIZE), 4), batch_size=2)),
            "batch_size=2 in the loader, 4",
        ),
        (lambda: list(ElasticSampler(5, order=lambda epoch: [1, 2])), r"order\(0\) has shape \[2\]"),
    ),
)
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---- from foreign loaders ----

FOREIGN_BATCH = 4


def foreign_loader(rank: int, world: int, workers: int = 0) -> StatefulDataLoader:
    """As many trainings have it: a cursor on each rank, over torch's own sampler."""
    sampler = DistributedSampler(Squares(), num_replicas=world, rank=rank, shuffle=True, seed=9)
    sampler.set_epoch(1)
    options: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
    return StatefulDataLoader(Squares(), FOREIGN_BATCH, sampler=sampler, num_workers=workers, **options)


def global_progress(epoch: int, states: list[Any], old_world: int) -> dict[str, int]:
    """A merge hook: torchdata's cursors, one for each rank, as one for all."""
    given = {torchdata_batches(state) for state in states}
    if len(given) != 1:
        raise CheckpointError(f"the ranks had yielded different numbers of batches: {sorted(given)}")
    return {"epoch": epoch, "consumed": given.pop() * FOREIGN_BATCH * old_world}


class Pickled:
    """torchtitan's loader: its state is pickled under the name of its rank."""

    def __init__(self, loader: StatefulDataLoader, rank: int, world: int) -> None:
        self.loader, self.name, self.world = loader, f"dp_rank_{rank}", world

    def state_dict(self) -> dict[str, Any]:
        return {self.name: pickle.dumps(self.loader.state_dict()), "world_size": self.world}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("this is not loaded into")


def save_foreign(folder: Path, workers: int, stock: bool) -> list[int]:
    import torch.distributed.checkpoint as dcp

    rank, world = dist.get_rank(), dist.get_world_size()
    loader = foreign_loader(rank, world, workers)
    batches = iter(loader)
    seen = [index for _ in range(5) for index in indices(next(batches))]
    if stock:
        dcp.save({"dataloader": Pickled(loader, rank, world)}, checkpoint_id=str(folder / "step-5"))
    else:
        with Checkpointer(folder, {"dataloader": PerRank(loader)}) as checkpointer:
            checkpointer.save(5)
    return seen


def go_on_elastic(folder: Path) -> tuple[list[int], str, str]:
    sampler = ElasticSampler(SIZE, order=distributed_order(SIZE, seed=9))
    loader = ElasticLoader(DataLoader(Squares(), batch_size=3, sampler=sampler))
    with Checkpointer(folder, {"dataloader": loader}) as checkpointer:
        message = error_of(checkpointer.load)
    merged = Elastic(loader, merge=partial(global_progress, 1))
    with Checkpointer(folder, {"dataloader": merged}) as checkpointer:
        detail = checkpointer.load().components["dataloader"].detail
    return [index for batch in loader for index in indices(batch)], message, detail


@pytest.mark.parametrize(
    ("workers", "stock"), ((0, False), (2, False), (0, True)), ids=("plain", "workers", "torchtitan")
)
def test_torchdata_cursors_become_global_progress(tmp_path: Path, workers: int, stock: bool) -> None:
    seen = [index for found in _distributed.run(4, save_foreign, tmp_path, workers, stock) for index in found]
    results = _distributed.run(2, go_on_elastic, tmp_path)
    assert sorted(seen + [index for found, _, _ in results for index in found]) == list(range(SIZE))
    for _, message, detail in results:
        assert "pass Elastic(..., merge=)" in message or "saved as per_rank, here it is elastic" in message
        assert detail == "merged from the states of 4 ranks"


def go_on_foreign(folder: Path, seen: list[int]) -> list[int]:
    loader = foreign_loader(dist.get_rank(), dist.get_world_size())
    with Checkpointer(folder, {"dataloader": PerRank(loader)}) as checkpointer:
        checkpointer.load()
    return [index for batch in loader for index in indices(batch)]


@pytest.mark.parametrize("stock", (False, True))
def test_foreign_cursors_on_the_same_ranks(tmp_path: Path, stock: bool) -> None:
    seen = [index for found in _distributed.run(4, save_foreign, tmp_path, 0, stock) for index in found]
    rest = [index for found in _distributed.run(4, go_on_foreign, tmp_path, seen) for index in found]
    # DistributedSampler repeats a sample where ranks do not divide them.
    assert set(seen + rest) == set(range(SIZE))
    assert len(seen + rest) == -(-SIZE // 4) * 4


@pytest.mark.parametrize("state", ({}, {"_snapshot": 3}, {"_num_yielded": "many"}, None))
def test_no_state_of_torchdata(state: Any) -> None:
    with pytest.raises(CheckpointError, match="no state of torchdata"):
        torchdata_batches(state)
