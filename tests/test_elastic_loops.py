"""Every sample of every epoch exactly once, however the loop over an ElasticLoader is written and wherever it is saved.

The ranks of a job are loaders of this process, each run by a loop of its own. A leg of the job is run to its end, and
what it saw up to some step is kept; the next leg goes on from the states that the loaders had there.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import pytest
import torch
from test_elastic import Case, Squares, indices
from torch.utils.data import BatchSampler, DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from dcpring import CheckpointError, ElasticDataset, ElasticLoader, ElasticSampler

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's

SIZE = 29
EPOCHS = 3

Loop = Callable[[ElasticLoader, dict[str, int]], Iterator[Any]]
"""A training: yields every batch once it was used, and None after each pass; ``state`` is saved along."""


def until_the_end(loader: ElasticLoader, state: dict[str, int]) -> Iterator[Any]:
    """The common loop: the epoch is set, and noted in the body."""
    for epoch in range(state.get("epoch", 0), EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            state["epoch"] = epoch
            yield batch
        yield None


def next_epoch_is_noted(loader: ElasticLoader, state: dict[str, int]) -> Iterator[Any]:
    for epoch in range(state.get("epoch", 0), EPOCHS):
        loader.set_epoch(epoch)
        yield from loader
        state["epoch"] = epoch + 1
        yield None


def from_the_first_epoch(loader: ElasticLoader, state: dict[str, int]) -> Iterator[Any]:
    """Notes nothing, and begins again with epoch 0."""
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        yield from loader
        yield None


def by_the_loaders_epoch(loader: ElasticLoader, state: dict[str, int]) -> Iterator[Any]:
    for epoch in range(loader.epoch, EPOCHS):
        loader.set_epoch(epoch)
        yield from loader
        yield None


def without_set_epoch(loader: ElasticLoader, state: dict[str, int]) -> Iterator[Any]:
    for _ in range(loader.epoch, EPOCHS):
        yield from loader
        yield None


def while_epochs_are_left(loader: ElasticLoader, state: dict[str, int]) -> Iterator[Any]:
    while loader.epoch < EPOCHS:
        yield from loader
        yield None


def leaving_at_the_last_batch(loader: ElasticLoader, state: dict[str, int]) -> Iterator[Any]:
    for epoch in range(loader.epoch, EPOCHS):
        loader.set_epoch(epoch)
        left = loader.batches_left
        for number, batch in enumerate(loader):
            yield batch
            if number == left - 1:
                break
        yield None


def leaving_without_set_epoch(loader: ElasticLoader, state: dict[str, int]) -> Iterator[Any]:
    for _ in range(loader.epoch, EPOCHS):
        left = loader.batches_left if loader.consumed < SIZE else len(loader)
        for number, batch in enumerate(loader, 1):
            yield batch
            if number == left:
                break
            left = number + loader.batches_left
        yield None


def by_steps(loader: ElasticLoader, state: dict[str, int]) -> Iterator[Any]:
    """Iterators that are never asked for more than there is."""
    for epoch in range(loader.epoch, EPOCHS):
        loader.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(loader.batches_left):
            yield next(batches)
        yield None


def in_pieces(loader: ElasticLoader, state: dict[str, int]) -> Iterator[Any]:
    """Two batches for each iterator."""
    for epoch in range(state.get("epoch", 0), EPOCHS):
        loader.set_epoch(epoch)
        while loader.epoch == epoch and loader.batches_left:
            state["epoch"] = epoch
            for number, batch in enumerate(loader):
                yield batch
                if number:
                    break
        yield None


LOOPS: list[Loop] = [
    until_the_end,
    next_epoch_is_noted,
    from_the_first_epoch,
    by_the_loaders_epoch,
    without_set_epoch,
    while_epochs_are_left,
    leaving_at_the_last_batch,
    leaving_without_set_epoch,
    by_steps,
    in_pieces,
]


class Event(NamedTuple):
    """A batch that was used, or the end of a pass where there are no samples, and what would be saved there."""

    epoch: int
    samples: list[int]
    state: dict[str, Any]
    noted: dict[str, int]


def run(loop: Loop, loader: ElasticLoader, noted: dict[str, int]) -> list[list[Event]]:
    """All events of a rank, by pass."""
    passes: list[list[Event]] = [[]]
    for batch in loop(loader, noted):
        samples = [] if batch is None else indices(batch)
        passes[-1].append(Event(loader.epoch, samples, loader.state_dict(), dict(noted)))
        if batch is None:
            passes.append([])
    return passes[:-1]


class Saved(NamedTuple):
    seen: Counter[tuple[int, int]]
    state: dict[str, Any]
    noted: dict[str, int]


def run_leg(
    loop: Loop, make: Callable[[int, int], ElasticLoader], world: int, before: Saved, pick: random.Random | None
) -> Saved:
    """Goes on from what was saved, up to a step that is picked (the end if there is no picking), and saves."""
    loaders = [make(rank, world) for rank in range(world)]
    if before.state:
        for loader in loaders:
            loader.load_state_dict(before.state)
    ranks = [run(loop, loader, dict(before.noted)) for loader in loaders]
    assert len({len(passes) for passes in ranks}) == 1
    if pick is None:
        return Saved(before.seen + seen_in([event for passes in ranks for one in passes for event in one]), {}, {})
    if not ranks[0]:
        return before
    number = pick.randrange(len(ranks[0]))
    most = max(len(passes[number]) for passes in ranks) - 1
    step = pick.randrange(most + 1)
    waits = pick.random() < 0.5
    states, seen = [], before.seen
    for passes in ranks:
        *used, end = passes[number]
        # A rank that had fewer batches is at its last one still, or has found out that there are no more.
        last = used[-1] if used and waits else end
        states.append(end if step == most else used[step] if step < len(used) else last)
        seen = seen + seen_in([event for one in passes[:number] for event in one] + used[: step + 1])
    combined = loaders[0].combine_state_dicts([event.state for event in states])
    return Saved(seen, combined, states[0].noted)


def seen_in(events: list[Event]) -> Counter[tuple[int, int]]:
    return Counter((event.epoch, sample) for event in events for sample in event.samples)


def small_loader(rank: int, world: int, batch_size: int = 3) -> ElasticLoader:
    sampler = ElasticSampler(SIZE, rank=rank, world_size=world, shuffle=False)
    return ElasticLoader(DataLoader(Squares(), batch_size, sampler=sampler))


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_any_loop_saved_anywhere(loop: Loop) -> None:
    everything = Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(SIZE))
    for seed in range(40):
        pick = random.Random(seed)
        saved = Saved(Counter(), {}, {})
        batch_size = pick.choice((1, 3, 4, 10))
        make = partial(small_loader, batch_size=batch_size)
        worlds = [pick.choice((1, 2, 3, 4, 7)) for _ in range(pick.randrange(1, 4))]
        for world in worlds:
            saved = run_leg(loop, make, world, saved, pick)
        saved = run_leg(loop, make, pick.choice((1, 2, 4)), saved, None)
        assert saved.seen == everything, (seed, worlds, batch_size)


@pytest.mark.parametrize("loop", (until_the_end, without_set_epoch), ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("position", ("last batch", "after the loop"))
def test_the_end_of_an_epoch(loop: Loop, position: str) -> None:
    """The case that trains an epoch twice where a state at its end is taken for the start of the next."""
    first = run(loop, small_loader(0, 1), noted := {})[0]
    event = first[-2 if position == "last batch" else -1]
    assert (event.state["epoch"], event.state["consumed"]) == ((0, SIZE) if position == "last batch" else (1, 0))
    loader = small_loader(0, 1)
    loader.load_state_dict(event.state)
    rest = [event for one in run(loop, loader, dict(event.noted)) for event in one]
    assert Counter(sample for event in first + rest for sample in event.samples) == dict.fromkeys(range(SIZE), EPOCHS)
    assert noted == event.noted or loop is until_the_end


def test_one_batch_is_fetched_ahead() -> None:
    """As accelerate does, to know which is the last: at the last batch the loader is at the next epoch already."""

    def ahead(loader: ElasticLoader) -> Iterator[Any]:
        batches = iter(loader)
        current = next(batches, None)
        while current is not None:
            following = next(batches, None)
            yield current
            current = following

    loader = small_loader(0, 1)
    used = [indices(batch) for batch in ahead(loader)]
    state = loader.state_dict()
    assert sorted(index for batch in used for index in batch) == list(range(SIZE))
    assert (state["epoch"], state["consumed"]) == (1, 0)
    loader = small_loader(0, 1)
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert list(ahead(loader)) == []
    loader.set_epoch(1)
    assert len(list(ahead(loader))) == len(loader)


def test_an_endless_stream_of_batches() -> None:
    def endless(loader: ElasticLoader) -> Iterator[Any]:
        while True:
            yield from loader

    everything = [indices(batch) for batch, _ in zip(endless(small_loader(0, 1)), range(30), strict=False)]
    for saved_at in range(1, 25):
        loader = small_loader(0, 1)
        for _, _batch in zip(range(saved_at), endless(loader), strict=False):
            pass
        state = loader.state_dict()
        loader = small_loader(0, 1)
        loader.load_state_dict(state)
        rest = [indices(batch) for _, batch in zip(range(30 - saved_at), endless(loader), strict=False)]
        assert rest == everything[saved_at:]


@pytest.mark.parametrize(
    ("case", "loop"),
    (
        (Case(DataLoader, workers=1, persistent=True), until_the_end),
        (Case(DataLoader, iterable=True, workers=2, persistent=True, batch_size=20), until_the_end),
        (Case(StatefulDataLoader, workers=1, batch_size=40), in_pieces),
        (Case(StatefulDataLoader, iterable=True, batch_size=None), in_pieces),
    ),
    ids=("workers", "iterable", "torchdata", "unbatched"),
)
def test_loops_with_workers(case: Case, loop: Loop) -> None:
    saved = Saved(Counter(), {}, {})
    for world, pick in ((1, random.Random(1)), (2, None)):
        saved = run_leg(loop, case.make, world, saved, pick)
    assert saved.seen == Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(len(Squares())))


@pytest.mark.parametrize("remainder", ("drop", "repeat"))
def test_other_remainders(remainder: Any) -> None:
    """Nothing is left out but at most one sample a rank, and nothing repeated but as much."""

    def make(rank: int, world: int) -> ElasticLoader:
        sampler = ElasticSampler(SIZE, seed=4, rank=rank, world_size=world, remainder=remainder)
        return ElasticLoader(DataLoader(Squares(), 3, sampler=sampler))

    for seed in range(30):
        saved = Saved(Counter(), {}, {})
        for pick in (random.Random(seed), None):
            saved = run_leg(until_the_end, make, 4, saved, pick)
        for epoch in range(EPOCHS):
            seen = Counter({sample: times for (of, sample), times in saved.seen.items() if of == epoch})
            assert sum(seen.values()) == (SIZE // 4 * 4 if remainder == "drop" else -(-SIZE // 4) * 4)
            assert len(seen) == (SIZE if remainder == "repeat" else SIZE // 4 * 4)


def test_an_order_with_repeats() -> None:
    """Sampling with replacement is an order like any other."""

    def order(epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(epoch)
        return torch.multinomial(torch.arange(1.0, SIZE + 1), SIZE, replacement=True, generator=generator)

    def make(rank: int, world: int) -> ElasticLoader:
        return ElasticLoader(
            DataLoader(Squares(), 2, sampler=ElasticSampler(SIZE, order=order, rank=rank, world_size=world))
        )

    saved = Saved(Counter(), {}, {})
    for world, pick in ((2, random.Random(5)), (3, random.Random(6)), (1, None)):
        saved = run_leg(until_the_end, make, world, saved, pick)
    assert saved.seen == Counter((epoch, index) for epoch in range(EPOCHS) for index in order(epoch).tolist())


# ---- what else sets the position ----


def test_a_load_within_a_loop() -> None:
    """Training goes back after a bad step, in the loop that it is in: the loop goes on from there."""
    loader = small_loader(0, 1)
    kept: list[list[int]] = []
    saved = None
    for number, batch in zip(count(), loader, strict=False):
        kept.append(indices(batch))
        if number == 2:
            saved = loader.state_dict()
        if number == 5:
            assert saved is not None
            loader.load_state_dict(saved)
            kept = kept[:3]
    assert sorted(index for samples in kept for index in samples) == list(range(SIZE))
    assert (loader.epoch, loader.consumed) == (1, 0)


def test_the_epoch_is_set_within_a_loop() -> None:
    loader = small_loader(0, 1)
    for batch in loader:
        loader.set_epoch(3)
        assert indices(batch)
    assert (loader.epoch, loader.consumed) == (3, 0)
    assert len(list(loader)) == len(loader)


def test_two_iterators_at_once() -> None:
    loader = small_loader(0, 1)
    one, other = iter(loader), iter(loader)
    next(one)
    next(other)
    with pytest.raises(RuntimeError, match="another iterator of this ElasticLoader"):
        next(one)
    assert loader.consumed == 6


def test_going_back_in_the_same_run() -> None:
    """A validation loader is set to the same epoch again and again; only after a resume that is nothing new."""
    loader = small_loader(0, 1)
    for _ in range(3):
        loader.set_epoch(0)
        assert len(list(loader)) == len(loader)


def test_epochs_before_the_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    loader = small_loader(0, 1)
    loader.load_state_dict({"epoch": 2, "consumed": 6})
    for epoch in range(3):
        loader.set_epoch(epoch)
        given = [indices(batch) for batch in loader]
        assert len(given) == (0 if epoch < 2 else len(loader) - 2)
    assert "epoch 0 was used up before the checkpoint, which is at epoch 2" in caplog.text
    loader.set_epoch(0)
    assert len(list(loader)) == len(loader), "a batch was given since: going back is meant"


def test_a_rank_that_is_an_epoch_behind_is_an_error() -> None:
    """It ran out of samples, but that excuses it for the rest of the epoch only."""
    loader = small_loader(0, 1)
    state = loader.state_dict()
    states = [{**state, "epoch": 1, "consumed": 12}, {**state, "consumed": SIZE - 1, "ran_out": True}]
    with pytest.raises(CheckpointError, match="rank 1 were given fewer batches"):
        loader.combine_state_dicts(states)


def test_the_length_is_that_of_an_epoch() -> None:
    loaders = [small_loader(rank, 4) for rank in range(4)]
    lengths = set()
    for loader in loaders:
        for _ in loader:
            lengths.add(len(loader))
    assert lengths == {3}
    assert [sum(1 for _ in loader) for loader in loaders] == [3, 3, 3, 3]
    assert [loader.batches_left for loader in loaders] == [3, 3, 3, 3]


# ---- loaders ----


@pytest.mark.parametrize("kind", (DataLoader, StatefulDataLoader))
def test_a_batch_sampler_of_torchs(kind: type[Any]) -> None:
    def make(rank: int, world: int) -> ElasticLoader:
        sampler = ElasticSampler(SIZE, seed=4, rank=rank, world_size=world)
        return ElasticLoader(kind(Squares(), batch_sampler=BatchSampler(sampler, 3, drop_last=False)))

    loader = make(0, 1)
    next(iter(loader))
    assert (loader.consumed, len(loader), loader.batches_left) == (3, 10, 9)
    saved = Saved(Counter(), {}, {})
    for world, pick in ((2, random.Random(3)), (3, None)):
        saved = run_leg(until_the_end, make, world, saved, pick)
    assert saved.seen == Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(SIZE))


class Pairs(BatchSampler):
    """A subclass may make other batches."""


def test_loaders_whose_batches_cannot_be_counted() -> None:
    sampler = ElasticSampler(SIZE)
    with pytest.raises(ValueError, match=r"a Pairs decides what makes a batch.*BatchSampler\(ElasticSampler"):
        ElasticLoader(DataLoader(Squares(), batch_sampler=Pairs(sampler, 2, False)))
    with pytest.raises(ValueError, match='remainder="drop"'):
        ElasticLoader(DataLoader(Squares(), batch_sampler=BatchSampler(sampler, 2, True)))
    with pytest.raises(ValueError, match="not SequentialSampler"):
        ElasticLoader(
            DataLoader(Squares(), batch_sampler=BatchSampler(torch.utils.data.SequentialSampler([1]), 2, False))
        )
    with pytest.raises(ValueError, match="in_order=False"):
        ElasticLoader(DataLoader(Squares(), 2, sampler=sampler, num_workers=1, in_order=False))
    with pytest.raises(ValueError, match="batch_size=2 in the loader, 3 in its ElasticDataset"):
        ElasticLoader(DataLoader(ElasticDataset(Squares(), sampler, 3), batch_size=2))
