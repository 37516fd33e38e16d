"""Components of plain data that has to come back exactly: of all ranks alike, of all together, or of each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar

import torch

from dcpring.base import random_states
from dcpring.base.text import ranks, spans
from dcpring.errors import CheckpointError
from dcpring.resume import trees
from dcpring.resume.components import AS_SAVED, HANDED_OVER, Component, ComponentPlan, Member
from dcpring.resume.manifest import PER_RANK, Stored, rank_key, unpickled


class Replicated(Component):
    """State that is the same on all ranks: step counters, configuration, learning rate schedules. Saved once.

    Ranks whose states differ at a save are an error that names them.

    Args:
        stateful: has ``state_dict()`` and ``load_state_dict()``, or is a mutable mapping.
    """

    kind = "replicated"
    cure: ClassVar[str] = "what belongs to a rank is PerRank"

    def state(self) -> Any:
        return dict(self.stateful) if isinstance(self.stateful, MutableMapping) else self.stateful.state_dict()

    def note(self, state: Any, member: Member) -> Any:
        return trees.digest(state)

    def disagreements(self, notes: Sequence[Any]) -> list[str]:
        others = [rank for rank, note in enumerate(notes) if note != notes[0]]
        if not others:
            return []
        return [f"{spans(others)} differ from rank 0; {self.cure}"]

    def to_save(self, state: Any, notes: Sequence[Any], member: Member) -> dict[str, Any]:
        return {"": trees.encode(state)} if member.rank == 0 else {}

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        problems = self._kind_problems(name, stored)
        if stored.rank_keys(name) and not problems:
            problems = [f"it holds states of {ranks(len(stored.rank_keys(name)))}; wrap it in PerRank() or Elastic()"]
        return ComponentPlan(stored.blank(stored.keys.get(name, [])), problems)

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], member: Member) -> Any:
        return stored.rebuilt(target, depth=1)

    def apply(self, state: Any, before: Sequence[Component]) -> None:
        if isinstance(self.stateful, MutableMapping):
            self.stateful.clear()
            self.stateful.update(state)
        else:
            self.stateful.load_state_dict(state)
        self._given = state


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

    def note(self, state: Any, member: Member) -> Any:
        return state

    def disagreements(self, notes: Sequence[Any]) -> list[str]:
        try:
            self._combined(notes)
        except CheckpointError as error:
            return [str(error)]
        return []

    def _combined(self, states: Sequence[Any]) -> Any:
        combine = getattr(self.stateful, "combine_state_dicts", None)
        if combine is not None:
            return combine(list(states))
        first = trees.digest(states[0])
        others = [rank for rank, state in enumerate(states) if trees.digest(state) != first]
        if others:
            raise CheckpointError(f"the progress of {spans(others)} is not that of rank 0")
        return states[0]

    def to_save(self, state: Any, notes: Sequence[Any], member: Member) -> dict[str, Any]:
        return {"": trees.encode(self._combined(notes))} if member.rank == 0 else {}

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        by_rank = stored.rank_keys(name)
        problems = self._kind_problems(name, stored, accepted=[PerRank.kind] if by_rank else [])
        if not by_rank:
            return ComponentPlan(stored.blank(stored.keys.get(name, [])), problems, *self._from_to(stored, member))
        keys, found = _keys_of_ranks(name, stored, by_rank)
        if self.merge is None:
            found.append(f"it holds states of {ranks(len(by_rank))} of their own; pass Elastic(..., merge=)")
        change = f"merged from the states of {ranks(len(by_rank))}"
        return ComponentPlan(stored.blank(keys), problems + found, change, True)

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], member: Member) -> Any:
        by_rank = stored.rank_keys(name)
        if by_rank and self.merge is not None:
            state = self.merge(_states_of_ranks(stored, by_rank, target), len(by_rank))
        else:
            state = stored.rebuilt(target, depth=1)
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

    def apply(self, state: Any, before: Sequence[Component]) -> None:
        super().apply(state, before)
        self._given = state if self._is_own else None


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
        self._has_rank_in_its_state = False
        if (rank is None) != (world_size is None):
            raise ValueError("PerRank takes rank and world_size together, or neither")
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}, world_size={world_size}: the rank must be from 0 to world_size - 1")
        self.reshard = reshard
        self._own_member = Member(rank, world_size) if rank is not None and world_size is not None else None

    def member(self, member: Member) -> Member:
        """This process among those that have a state of their own."""
        return self._own_member or member

    def state(self) -> Any:
        is_generator = isinstance(self.stateful, torch.Generator)
        return {"state": self.stateful.get_state()} if is_generator else self.stateful.state_dict()

    def note(self, state: Any, member: Member) -> Any:
        own = self.member(member)
        return own.rank, own.world_size, trees.digest(state) if own != member else ""

    def disagreements(self, notes: Sequence[Any]) -> list[str]:
        worlds = {world for _, world, _ in notes}
        if len(worlds) > 1:
            return [f"ranks were given different world sizes: {sorted(worlds)}"]
        absent = set(range(max(worlds))) - {rank for rank, _, _ in notes}
        if absent:
            return [f"no process has the state of {spans(absent)}"]
        first = {rank: digest for rank, _, digest in reversed(notes)}
        different = [index for index, (rank, _, digest) in enumerate(notes) if digest != first[rank]]
        if different:
            return [f"{spans(different)} differ from the first process that has the same PerRank rank"]
        return []

    def to_save(self, state: Any, notes: Sequence[Any], member: Member) -> dict[str, Any]:
        own = self.member(member).rank
        writer = next(index for index, note in enumerate(notes) if note[0] == own)
        return {rank_key(own): trees.encode(state)} if writer == member.rank else {}

    def entry(self, notes: Sequence[Any]) -> dict[str, Any]:
        return {"world_size": notes[0][1]}

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        own, by_rank = self.member(member), stored.rank_keys(name)
        problems = self._kind_problems(name, stored)
        keys, found = _keys_of_ranks(name, stored, by_rank)
        problems += found
        old = len(by_rank)
        change = AS_SAVED if self._is_known else HANDED_OVER
        if old == own.world_size or problems:
            own_keys = by_rank.get(own.rank, [])
            self._has_rank_in_its_state = not problems and self._gives(own_keys, stored)
            if self._has_rank_in_its_state:
                own_keys = own_keys + [key for key in stored.keys[name] if key not in set(keys)]
            return ComponentPlan(stored.blank(own_keys), problems, change)
        if self.reshard is None:
            problems.append(
                f"it belongs to ranks, and was saved by {ranks(old)}, not {own.world_size}; "
                "pass PerRank(..., reshard=), or leave it out"
            )
        return ComponentPlan(stored.blank(keys), problems, f"from {ranks(old)} to {own.world_size}", True)

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], member: Member) -> Any:
        own, by_rank = self.member(member), stored.rank_keys(name)
        if self._has_rank_in_its_state:
            _states_of_ranks(stored, {own.rank: by_rank[own.rank]}, target)  # it unpickles that itself: plain data only
            return stored.rebuilt(target, depth=1)
        if len(by_rank) == own.world_size:
            return _states_of_ranks(stored, {own.rank: by_rank[own.rank]}, target)[0]
        assert self.reshard is not None
        states = _states_of_ranks(stored, by_rank, target)
        return self.reshard(states, len(by_rank), own.world_size, own.rank)

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

    def apply(self, state: Any, before: Sequence[Component]) -> None:
        if isinstance(self.stateful, torch.Generator):
            self.stateful.set_state(state["state"])
        else:
            self.stateful.load_state_dict(state)


def _keys_of_ranks(name: str, stored: Stored, by_rank: dict[int, list[str]]) -> tuple[list[str], list[str]]:
    """All keys of a component that belong to ranks, and why they are not all there."""
    expected = stored.entry(name).get("world_size", len(by_rank))
    absent = set(range(max(expected, len(by_rank)))) - by_rank.keys()
    if not by_rank or absent:
        return [], [
            f"the checkpoint has no state of {spans(absent)} in it" if absent else "it holds no state of any rank"
        ]
    return [key for keys in by_rank.values() for key in keys], []


def _states_of_ranks(stored: Stored, by_rank: dict[int, list[str]], target: dict[str, Any]) -> list[Any]:
    states = [stored.rebuilt({key: target[key] for key in by_rank[rank]}, depth=2) for rank in sorted(by_rank)]
    if stored.manifest is not None:
        return states
    return [unpickled(state, stored.reader) if isinstance(state, bytes) else state for state in states]
