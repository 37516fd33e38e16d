"""Components of plain data that has to come back exactly: of all ranks alike, of all together, or of each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from dcpring.base import random_states
from dcpring.base.text import ranks, spans
from dcpring.errors import CheckpointError
from dcpring.resume import trees
from dcpring.resume.components import (
    AS_SAVED,
    HANDED_OVER,
    Component,
    ComponentPlan,
    Member,
    Remarks,
    SaveCheck,
    give_state,
    kind_problems,
    no_remarks,
    state_of,
)
from dcpring.resume.manifest import PER_RANK, Stored, rank_key, unpickled


class Replicated(Component):
    """State that is the same on all ranks: step counters, configuration, learning rate schedules. Saved once.

    Ranks whose states differ at a save are an error that names them.

    Args:
        stateful: has ``state_dict()`` and ``load_state_dict()``, or is a mutable mapping.
    """

    kind = "replicated"
    cure: ClassVar[str] = "what belongs to a rank is PerRank"

    def collect(self, member: Member) -> tuple[Any, Any]:
        state = state_of(self.stateful)
        return state, trees.digest(state)

    def check(self, state: Any, notes: Sequence[Any], member: Member) -> SaveCheck:
        others = [rank for rank, note in enumerate(notes) if note != notes[0]]
        if others:
            return SaveCheck(problems=[f"{spans(others)} differ from rank 0; {self.cure}"])
        return SaveCheck(trees.encode(state) if member.rank == 0 else None)

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        problems = kind_problems(self, name, stored)
        if stored.rank_keys(name) and not problems:
            problems = [f"it holds states of {ranks(len(stored.rank_keys(name)))}; wrap it in PerRank() or Elastic()"]
        target = stored.blank(stored.keys.get(name, []))
        return ComponentPlan(target, problems, rebuild=partial(stored.rebuilt, depth=1))


class Elastic(Component):
    """Global progress that any number of ranks can go on from, such as that of an ``ElasticLoader``. Saved once.

    Args:
        stateful: has ``state_dict()`` and ``load_state_dict()``. Where it has ``combine_state_dicts(states)``, that
            makes one state of all ranks' at a save, or raises; else they must be equal. Where it has
            ``check_state_dict(state)``, that raises if the state does not fit, and changes nothing.
        merge: ``merge(states, old_world)`` makes global progress of the states that ranks had of their own in a
            checkpoint that has such; ``states`` is in the order of ranks.
    """

    kind = "elastic"

    def __init__(self, stateful: Any, merge: Callable[[list[Any], int], Any] | None = None) -> None:
        super().__init__(stateful)
        self.merge = merge

    def collect(self, member: Member) -> tuple[Any, Any]:
        state = state_of(self.stateful)
        return state, state

    def check(self, state: Any, notes: Sequence[Any], member: Member) -> SaveCheck:
        try:
            combined = self._combined(notes)
        except CheckpointError as error:
            return SaveCheck(problems=[str(error)])
        return SaveCheck(trees.encode(combined) if member.rank == 0 else None)

    def _combined(self, states: Sequence[Any]) -> Any:
        combine = getattr(self.stateful, "combine_state_dicts", None)
        if combine is not None:
            return combine(list(states))
        first = trees.digest(states[0])
        others = [rank for rank, state in enumerate(states) if trees.digest(state) != first]
        if others:
            raise CheckpointError(f"the progress of {spans(others)} is not that of rank 0")
        return states[0]

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        by_rank = stored.rank_keys(name)
        problems = kind_problems(self, name, stored, accepted=[PerRank.kind] if by_rank else [])
        if not by_rank:
            change, is_resharded = self._from_to(stored, member)
            target = stored.blank(stored.keys.get(name, []))
            return ComponentPlan(target, problems, change, is_resharded, rebuild=partial(self._rebuilt, stored, {}))
        keys, found = _keys_of_ranks(name, stored, by_rank)
        if self.merge is None:
            found.append(f"it holds states of {ranks(len(by_rank))} of their own; pass Elastic(..., merge=)")
        change = f"merged from the states of {ranks(len(by_rank))}"
        rebuild = partial(self._rebuilt, stored, by_rank)
        return ComponentPlan(stored.blank(keys), problems + found, change, True, rebuild=rebuild)

    def _rebuilt(self, stored: Stored, by_rank: dict[int, list[str]], read: dict[str, Any]) -> Any:
        if by_rank and self.merge is not None:
            state = self.merge(_states_of_ranks(stored, by_rank, read), len(by_rank))
        else:
            state = stored.rebuilt(read, depth=1)
        check = getattr(self.stateful, "check_state_dict", None)
        if check is not None:
            check(state)
        return state

    def _from_to(self, stored: Stored, member: Member) -> tuple[str, bool]:
        old = stored.world_size
        if old is None or old == member.world_size:
            return AS_SAVED if self._is_own else HANDED_OVER, False
        return f"from {ranks(old)} to {member.world_size}", True

    @property
    def _is_own(self) -> bool:
        """Whether it can be asked for its state after a load; a loader of another kind begins to load by that."""
        return hasattr(self.stateful, "check_state_dict")

    def take(self, ready: Any, before: Sequence[Component]) -> Remarks:
        remarks = super().take(ready, before)
        return remarks if self._is_own else no_remarks


class PerRank(Component):
    """State that belongs to a rank, such as a foreign data loader's cursor. Every rank's is saved.

    Args:
        stateful: has ``state_dict()`` and ``load_state_dict()``, or is a ``torch.Generator``.
        reshard: ``reshard(states, old_world, new_world, rank)`` gives the state of one of the new ranks out of those
            of all old ones, in order. Without it, another number of ranks is an error.
        rank: this process's, where several share one state (data-parallel rank under tensor parallelism); those must
            have equal states. Default: its own.
        world_size: the number of such ranks.
    """

    kind = PER_RANK

    def __init__(
        self,
        stateful: Any,
        reshard: Callable[[list[Any], int, int, int], Any] | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(stateful)
        if (rank is None) != (world_size is None):
            raise ValueError("PerRank takes rank and world_size together, or neither")
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}, world_size={world_size}: the rank must be from 0 to world_size - 1")
        self.reshard = reshard
        self._own_member = Member(rank, world_size) if rank is not None and world_size is not None else None

    def member(self, member: Member) -> Member:
        """This process among those that have a state of their own."""
        return self._own_member or member

    def collect(self, member: Member) -> tuple[Any, Any]:
        is_generator = isinstance(self.stateful, torch.Generator)
        state = {"state": self.stateful.get_state()} if is_generator else state_of(self.stateful)
        own = self.member(member)
        return state, (own.rank, own.world_size, trees.digest(state) if own != member else "")

    def check(self, state: Any, notes: Sequence[Any], member: Member) -> SaveCheck:
        problems = _problems_of_ranks(notes)
        if problems:
            return SaveCheck(problems=problems)
        own, entry = self.member(member).rank, {"world_size": notes[0][1]}
        writer = next(index for index, note in enumerate(notes) if note[0] == own)
        return SaveCheck({rank_key(own): trees.encode(state)} if writer == member.rank else None, entry)

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        own, by_rank = self.member(member), stored.rank_keys(name)
        problems = kind_problems(self, name, stored)
        keys, found = _keys_of_ranks(name, stored, by_rank)
        problems += found
        old = len(by_rank)
        change = AS_SAVED if self._is_known else HANDED_OVER
        if old == own.world_size or problems:
            own_keys = by_rank.get(own.rank, [])
            rebuild = partial(_state_of_rank, stored, own_keys)
            if not problems and self._gives(own_keys, stored):
                rebuild = partial(_state_with_rank, stored, own_keys)
                own_keys = own_keys + [key for key in stored.keys[name] if key not in set(keys)]
            return ComponentPlan(stored.blank(own_keys), problems, change, rebuild=rebuild)
        if self.reshard is None:
            problems.append(
                f"it belongs to ranks, and was saved by {ranks(old)}, not {own.world_size}; "
                "pass PerRank(..., reshard=), or leave it out"
            )
        rebuild = partial(self._resharded, stored, by_rank, own)
        return ComponentPlan(
            stored.blank(keys), problems, f"from {ranks(old)} to {own.world_size}", True, rebuild=rebuild
        )

    def _resharded(self, stored: Stored, by_rank: dict[int, list[str]], own: Member, read: dict[str, Any]) -> Any:
        assert self.reshard is not None
        return self.reshard(_states_of_ranks(stored, by_rank, read), len(by_rank), own.world_size, own.rank)

    @property
    def _is_known(self) -> bool:
        """Whether what is handed over is taken over; a loader cannot be asked, as it begins to load by that."""
        return isinstance(self.stateful, torch.Generator)

    def _gives(self, keys: Sequence[str], stored: Stored) -> bool:
        """Whether the object puts its rank into its state dict itself, as torchtitan's loader does ("dp_rank_3").

        What it saved is then the whole of what lies below the component.
        """
        names = {str(stored.paths[key][1]) for key in keys}
        if stored.manifest is not None or not names or isinstance(self.stateful, torch.Generator):
            return False
        with random_states.kept():
            own = self.stateful.state_dict()
        return isinstance(own, Mapping) and names <= own.keys()

    def take(self, ready: Any, before: Sequence[Component]) -> Remarks:
        if isinstance(self.stateful, torch.Generator):
            self.stateful.set_state(ready["state"])
        else:
            give_state(self.stateful, ready)
        return no_remarks


def _problems_of_ranks(notes: Sequence[tuple[int, int, str]]) -> list[str]:
    """Why states of ranks cannot be saved together.

    Args:
        notes: of each process the rank that it saves for, the number of such ranks, and a digest of its state where
            others may save for the same rank.
    """
    worlds = {world for _, world, _ in notes}
    if len(worlds) > 1:
        return [f"ranks were given different world sizes: {sorted(worlds)}"]
    absent = set(range(max(worlds))) - {rank for rank, _, _ in notes}
    if absent:
        return [f"no process has the state of {spans(absent)}"]
    first = {rank: digest for rank, _, digest in reversed(notes)}
    different = [index for index, (rank, _, digest) in enumerate(notes) if digest != first[rank]]
    return [f"{spans(different)} differ from the first process that has the same PerRank rank"] if different else []


def _keys_of_ranks(name: str, stored: Stored, by_rank: dict[int, list[str]]) -> tuple[list[str], list[str]]:
    """All keys of a component that belong to ranks, and why they are not all there."""
    expected = stored.entry(name).get("world_size", len(by_rank))
    absent = set(range(max(expected, len(by_rank)))) - by_rank.keys()
    if not by_rank or absent:
        return [], [
            f"the checkpoint has no state of {spans(absent)} in it" if absent else "it holds no state of any rank"
        ]
    return [key for keys in by_rank.values() for key in keys], []


def _states_of_ranks(stored: Stored, by_rank: dict[int, list[str]], read: dict[str, Any]) -> list[Any]:
    return [_state_of_rank(stored, by_rank[rank], read) for rank in sorted(by_rank)]


def _state_of_rank(stored: Stored, keys: list[str], read: dict[str, Any]) -> Any:
    state = stored.rebuilt({key: read[key] for key in keys}, depth=2)
    return unpickled(state, stored.reader) if stored.manifest is None and isinstance(state, bytes) else state


def _state_with_rank(stored: Stored, keys: list[str], read: dict[str, Any]) -> Any:
    """The whole of what an object gave that has its rank in its state; it unpickles that part itself."""
    _state_of_rank(stored, keys, read)  # refuses what is more than plain data
    return stored.rebuilt(read, depth=1)
