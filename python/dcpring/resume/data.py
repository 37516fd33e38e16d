"""A data pipeline whose progress belongs to no rank: a seed, an epoch, and how many of its samples were handed out.

An epoch is one global order of all samples, the same on every rank. ``ElasticSampler`` (or ``ElasticDataset``, for
iterable pipelines) deals what is left of it to the ranks in turns, so that after n batches on each rank the samples
used are exactly the next n * batch_size * ranks of the order. ``ElasticLoader`` counts the batches that the training
loop was given, whatever workers have read ahead. All of it lives in the main process; workers get the origin of their
pass through shared memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Sampler, get_worker_info

from dcpring.base import groups
from dcpring.base.text import spans
from dcpring.errors import CheckpointError

__all__ = ["ElasticDataset", "ElasticLoader", "ElasticSampler", "Permutation", "distributed_order", "torchdata_batches"]

logger = logging.getLogger("dcpring")

Order = Callable[[int], Sequence[int] | Tensor]
Remainder = Literal["uneven", "repeat", "drop"]

_CHUNK = 4096
"""Positions of the order that are looked up at a time."""

_ROUNDS = 6
_MASK32 = (1 << 32) - 1


class Permutation:
    """A pseudo-random order of ``range(size)`` that needs no memory and starts anywhere at once.

    A Feistel network over the next even number of bits; what falls outside of the range goes through it again. The
    result is part of the format: progress that was saved refers to it.

    Args:
        size: number of elements, at most 2**62.
        key: which permutation, from 0 to 2**64 - 1.
    """

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        self._half = max(1, -(-(max(size, 2) - 1).bit_length() // 2))
        self._keys = [_mixed_int(key, round) for round in range(_ROUNDS)]

    def take(self, positions: Tensor) -> Tensor:
        """The elements at these positions (int64, any shape)."""
        values = self._network(positions)
        outside = values >= self.size
        while bool(outside.any()):
            values[outside] = self._network(values[outside])
            outside = values >= self.size
        return values

    def _network(self, values: Tensor) -> Tensor:
        mask = (1 << self._half) - 1
        left, right = values >> self._half, values & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return left << self._half | right


def _mixed(values: Tensor) -> Tensor:
    """A 32-bit finalizer (Murmur3's) of each value."""
    values = values & _MASK32
    values = (values ^ values >> 16) * 0x85EBCA6B & _MASK32
    values = (values ^ values >> 13) * 0xC2B2AE35 & _MASK32
    return values ^ values >> 16


def _mixed_int(key: int, round: int) -> int:
    low = int(_mixed(torch.tensor(key & _MASK32)))
    high = int(_mixed(torch.tensor((key >> 32 & _MASK32) ^ low)))
    return int(_mixed(torch.tensor(high ^ low ^ 0x9E3779B9 * (round + 1) & _MASK32)))


def distributed_order(size: int, seed: int = 0, shuffle: bool = True) -> Order:
    """The order that ``torch.utils.data.DistributedSampler`` deals out, for going on where it was used."""

    def order(epoch: int) -> Sequence[int] | Tensor:
        generator = torch.Generator().manual_seed(seed + epoch)
        return torch.randperm(size, generator=generator) if shuffle else range(size)

    return order


class ElasticSampler(Sampler[int]):
    """Deals what is left of an epoch to the ranks in turns. For a loader inside of an ``ElasticLoader``.

    Args:
        size: samples of the dataset.
        seed: of the order; with the epoch it decides everything.
        shuffle: else the order is 0, 1, 2, ...
        order: another global order: ``order(epoch)`` gives all indices, the same on every rank.
        remainder: what becomes of samples that do not go round: "uneven" deals every sample exactly once, so some
            ranks may get one more, and perhaps one batch more; "repeat" deals some twice and "drop" leaves some out, so
            that all ranks get equally many.
        rank: this process's; under tensor parallelism its data-parallel rank. Default: of the default group, which
            trainers may make after the sampler.
        world_size: number of such ranks. Default: of the default group.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        order: Order | None = None,
        remainder: Remainder = "uneven",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._rank, self._world_size = rank, world_size
        if size < 1:
            raise ValueError(f"size={size}: an epoch has at least one sample")
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank}, world_size={self.world_size}: the rank must be below the world size")
        if remainder not in ("uneven", "repeat", "drop"):
            raise ValueError(f'remainder={remainder!r}: must be "uneven", "repeat" or "drop"')
        self.size, self.seed, self.shuffle, self.order, self.remainder = size, seed, shuffle, order, remainder
        # Epoch and origin of the pass under way: shared, as persistent workers live through many.
        self._pass = torch.zeros(2, dtype=torch.int64).share_memory_()

    @property
    def rank(self) -> int:
        if self._rank is None and groups.has_group():
            self._rank = groups.rank_in()
        return self._rank or 0

    @property
    def world_size(self) -> int:
        if self._world_size is None and groups.has_group():
            self._world_size = groups.world_size()
        return 1 if self._world_size is None else self._world_size

    @property
    def epoch(self) -> int:
        return int(self._pass[0])

    @property
    def origin(self) -> int:
        """Samples of the epoch that were used before this pass."""
        return int(self._pass[1])

    def seek(self, epoch: int, origin: int) -> None:
        """Where the next pass begins."""
        self._pass[0], self._pass[1] = epoch, origin

    def __len__(self) -> int:
        """Samples that this rank gets in the pass under way."""
        return self.share(self.origin)

    def share(self, origin: int) -> int:
        """Samples that this rank gets in a pass from an origin."""
        if self.remainder != "uneven":
            return self.most(origin)
        return max(0, -(-(self.size - origin - self.rank) // self.world_size))

    def most(self, origin: int) -> int:
        """The most samples that any rank gets in a pass from an origin."""
        left = max(0, self.size - origin)
        return left // self.world_size if self.remainder == "drop" else -(-left // self.world_size)

    def used(self, origin: int, per_rank: int) -> int:
        """Samples of the epoch that are used once each rank was given ``per_rank`` (or all of its share) of a pass."""
        return min(origin + per_rank * self.world_size, self.size)

    def __iter__(self) -> Iterator[int]:
        return self.indices(0, 1, 1)

    def indices(self, part: int, parts: int, batch_size: int) -> Iterator[int]:
        """This rank's samples; of its batches only every ``parts``-th, from ``part`` on (a worker's share)."""
        at, own, origin = self._lookup(self.epoch), len(self), self.origin
        for start in range(0, own, _CHUNK):
            turns = torch.arange(start, min(start + _CHUNK, own))
            turns = turns[turns // batch_size % parts == part]
            yield from at((origin + self.rank + turns * self.world_size) % self.size).tolist()

    def _lookup(self, epoch: int) -> Callable[[Tensor], Tensor]:
        if self.order is not None:
            order = torch.as_tensor(self.order(epoch), dtype=torch.int64)
            if order.shape != (self.size,):
                raise ValueError(f"order({epoch}) has shape {list(order.shape)}, not [{self.size}]")
            return lambda positions: order[positions]
        if not self.shuffle:
            return lambda positions: positions
        return Permutation(self.size, (self.seed << 32) + epoch & (1 << 64) - 1).take


class ElasticDataset(IterableDataset[Any]):
    """A map-style dataset as an iterable one, dealt out as ``sampler`` says; the loader's workers share the work.

    For pipelines that have to be iterable. Give the loader the same ``batch_size``, and no sampler.

    Args:
        dataset: map-style.
        sampler: of its size.
        batch_size: the loader's; None where it makes no batches.
    """

    def __init__(self, dataset: Dataset[Any], sampler: ElasticSampler, batch_size: int | None) -> None:
        self.dataset, self.sampler, self.batch_size = dataset, sampler, batch_size

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        part, parts = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in self.sampler.indices(part, parts, self.batch_size or 1):
            yield self.dataset[index]


class ElasticLoader:
    """A loader whose progress is global: save it on any number of ranks, go on with it on any other.

    Wraps torch's ``DataLoader`` or torchdata's ``StatefulDataLoader`` over an ``ElasticSampler`` or ``ElasticDataset``.
    A batch counts as used once the training loop has been given it. An iterator goes on where the last one stopped, in
    the same epoch; when a pass ends, or has given all that there was, the next one is of the next epoch.

    After a resume no sample is given again: a pass over an epoch that was used up before the checkpoint gives nothing,
    whether the loop begins with the checkpoint's epoch or asks by ``set_epoch`` for one before it.

    Args:
        loader: made with ``sampler=ElasticSampler(...)``, or over an ``ElasticDataset``.

    Attributes:
        loader: what was given.
        epoch: the one that the next batch is of.
        consumed: samples of it that were given to training loops, over all ranks.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.sampler, self._batch_size = _parts_of(loader)
        self.epoch = 0
        self.consumed = 0
        # The position has been set so many times: by set_epoch, by a load, by a pass that begins. A pass remembers the
        # generation that it began in, and sees by it that the position is not its own any more.
        self._generation = 0
        # What has set it: after a load a pass goes on from there, after set_epoch it ends; two at once are an error.
        self._mover: Literal["load", "epoch", "pass"] = "pass"
        # The epoch that set_epoch or a load has asked for since the last pass began.
        self._asked: int | None = None
        # Whether no batch was given since a state was loaded.
        self._is_resumed = False

    def __len__(self) -> int:
        """Batches of a whole epoch on these ranks: the same on all of them, and at any time.

        With ``remainder="uneven"`` some ranks may get one less.
        """
        return -(-self.sampler.most(0) // self._batch_size)

    @property
    def batches_left(self) -> int:
        """Batches that this rank has yet to be given of this epoch."""
        return -(-self.sampler.share(self.consumed) // self._batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch; does nothing if it is under way, so that a loop may call it after a resume.

        Until a batch was given after a resume, an epoch before that of the checkpoint gives nothing: it was used up.
        """
        if self._is_resumed and epoch < self.epoch:
            logger.warning(
                "epoch %d was used up before the checkpoint, which is at epoch %d: nothing of it is given again",
                epoch,
                self.epoch,
            )
        elif epoch != self.epoch:
            self._go_to(epoch, 0, "epoch")
        self._asked = epoch

    def _go_to(self, epoch: int, consumed: int, mover: Literal["load", "epoch", "pass"]) -> None:
        self.epoch, self.consumed, self._mover, self._asked = epoch, consumed, mover, None
        self._generation += 1

    def __iter__(self) -> Iterator[Any]:
        asked, self._asked = self._asked, None
        if asked is not None and asked < self.epoch:  # it was used up before the checkpoint
            self._asked = self.epoch
            return
        if asked is None and self.consumed and not self.batches_left:
            self._go_to(self.epoch + 1, 0, "pass")
        is_moved = True
        while is_moved:
            is_moved = yield from self._pass()

    def _pass(self) -> Generator[Any, None, bool]:
        """Gives what is left of this epoch; returns whether a load has moved the position, and the loop with it."""
        origin, given = self.consumed, 0
        self.sampler.seek(self.epoch, origin)
        self._go_to(self.epoch, origin, "pass")
        own = self._generation
        for batch in self.loader:
            given += self._batch_size
            self.consumed = self.sampler.used(origin, given)
            self._is_resumed = False
            yield batch
            if self._generation == own:
                continue
            if self._mover == "pass":
                raise RuntimeError(
                    "another iterator of this ElasticLoader was begun while this one was in use: a loader has one "
                    "position; make a loader for each"
                )
            return self._mover == "load"
        self._go_to(self.epoch + 1, 0, "pass")
        return False

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """This rank's view: ``epoch``, ``consumed``, whether it ran out of samples, and what makes the order."""
        sampler = self.sampler
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "ran_out": not self.batches_left,
            "size": sampler.size,
            "seed": sampler.seed,
            "shuffle": sampler.shuffle,
            "own_order": sampler.order is not None,
        }

    def combine_state_dicts(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """One state of all ranks'. A rank that ran out of samples before others may lag behind.

        Where some ranks are at the end of an epoch and others have moved on to the next, it is the end: a loop that is
        resumed may still have to come by there.

        Raises:
            CheckpointError: ranks were given different numbers of batches, or have different datasets or orders.
        """
        for name in ("size", "seed", "shuffle", "own_order"):
            others = [rank for rank, state in enumerate(states) if state[name] != states[0][name]]
            if others:
                raise CheckpointError(f"{name} is {states[0][name]} on rank 0, but not on {spans(others)}")
        furthest = max(map(_progress, states))
        lagging = [
            rank
            for rank, state in enumerate(states)
            if _progress(state) != furthest and not (state["ran_out"] and furthest <= (state["epoch"] + 1, 0))
        ]
        if lagging:
            pair = states[lagging[0]], max(states, key=_progress)
            behind, ahead = (f"epoch {state['epoch']}, {state['consumed']} samples" for state in pair)
            raise CheckpointError(
                f"{spans(lagging)} were given fewer batches ({behind}) than others ({ahead}); save where all ranks are "
                "at the same step"
            )
        there = [state for state in states if _progress(state) == furthest]
        state = min(there, key=lambda state: int(state["epoch"]))
        return {name: value for name, value in state.items() if name != "ran_out"}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError if the state is not of this dataset; changes nothing."""
        missing = [name for name in ("epoch", "consumed") if not isinstance(state.get(name), int)]
        if missing:
            raise CheckpointError(f"it is no progress of an ElasticLoader: it has no {' and no '.join(missing)}")
        size = state.get("size", self.sampler.size)
        if size != self.sampler.size:
            raise CheckpointError(
                f"saved in an epoch of {size} samples, the dataset now has {self.sampler.size}: what is left of the "
                "epoch cannot be told; use the same dataset, or leave this component out to begin an epoch"
            )
        if state.get("own_order", self.sampler.order is not None) != (self.sampler.order is not None):
            raise CheckpointError("saved with order= and resumed without, or the other way round")
        if not 0 <= state["consumed"] <= size or state["epoch"] < 0:
            raise CheckpointError(f"epoch {state['epoch']}, {state['consumed']} of {size} samples: that cannot be")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there, in a pass under way too: seed and shuffling are those that were saved."""
        self.check_state_dict(state)
        self._go_to(state["epoch"], state["consumed"], "load")
        self._asked, self._is_resumed = self.epoch, True
        self.sampler.seed = state.get("seed", self.sampler.seed)
        self.sampler.shuffle = state.get("shuffle", self.sampler.shuffle)


def _progress(state: dict[str, Any]) -> tuple[int, int]:
    """The end of an epoch is the start of the next."""
    is_over = state["consumed"] >= state["size"]
    return (state["epoch"] + 1, 0) if is_over else (state["epoch"], state["consumed"])


def _parts_of(loader: Any) -> tuple[ElasticSampler, int]:
    """The elastic part of a loader, which must be all that decides on samples and batches; and samples per batch."""
    dataset = getattr(loader, "dataset", None)
    sampler, batch_size = getattr(loader, "sampler", None), getattr(loader, "batch_size", None)
    drop_last = getattr(loader, "drop_last", False)
    batch_sampler = getattr(loader, "batch_sampler", None) if batch_size is None else None
    if type(batch_sampler) is BatchSampler:
        sampler, batch_size, drop_last = batch_sampler.sampler, batch_sampler.batch_size, batch_sampler.drop_last
    elif batch_sampler is not None:
        raise ValueError(
            f"a {type(batch_sampler).__name__} decides what makes a batch, so the progress of this loader cannot be "
            "counted; give it batch_size= and sampler=ElasticSampler(...), or a BatchSampler(ElasticSampler(...), ...)"
        )
    if drop_last:
        raise ValueError('drop_last=True would leave samples out unseen; use ElasticSampler(..., remainder="drop")')
    if not getattr(loader, "in_order", True):
        raise ValueError("in_order=False gives batches in an order that cannot be gone on with; leave it out")
    if isinstance(dataset, ElasticDataset):
        if dataset.batch_size != batch_size:
            raise ValueError(f"batch_size={batch_size} in the loader, {dataset.batch_size} in its ElasticDataset")
        return dataset.sampler, batch_size or 1
    if not isinstance(sampler, ElasticSampler):
        raise ValueError(
            f"ElasticLoader takes a loader made with sampler=ElasticSampler(...), not {type(sampler).__name__}"
        )
    return sampler, batch_size or 1


# ---- foreign loaders ----


def torchdata_batches(state: Any) -> int:
    """The batches that a ``StatefulDataLoader`` had yielded, out of its ``state_dict()``; for ``merge`` hooks.

    Raises:
        CheckpointError: it is no such state.
    """
    try:
        if "_snapshot" in state:
            return int(state["_snapshot"]["_snapshot_step"]) + int(state["_steps_since_snapshot"])
        return int(state["_num_yielded"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"this is no state of torchdata's StatefulDataLoader: {error}") from error
