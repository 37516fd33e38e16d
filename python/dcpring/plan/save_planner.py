"""RingSavePlanner: DCP's save planner with its work done in C.

Every rank describes what it holds as a compact table (``table``). The coordinator merges the tables, checks them,
gives each item a writer, and sends back a bitmap; DCP's objects are only made for storage that asks for them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from dcpring import _C
from dcpring.base.arguments import checks_names, shown
from dcpring.base.groups import host_id, rank_here, world_size
from dcpring.base.order import ranks_now, require_group, wait_for_turn
from dcpring.base.text import some_keys
from dcpring.base.whose import about_ranks
from dcpring.errors import CheckpointError, PlanError
from dcpring.format.lazy import Chunks, LazyMetadata
from dcpring.names.key_map import KeyMap, KeyMapLike, new_path, one_map
from dcpring.options import overrides
from dcpring.plan import replicas, strategy
from dcpring.plan.cache import PlanCache, cache_of
from dcpring.plan.flatten import Flat, flatten, open_sharded_tensors, path_code
from dcpring.plan.items import Items, own_items
from dcpring.plan.messages import LocalMessage, Outcome, Reply, RingPlan
from dcpring.plan.rows import row_of
from dcpring.plan.run import Save, run_of
from dcpring.plan.strategy import Choice, Writers
from dcpring.plan.table import HASHED, make_table, part_of, tied_rows
from dcpring.report import PlanReport, RankReport
from dcpring.torchside import versions
from dcpring.torchside.dcp import keep_plans_apart
from dcpring.torchside.groups import members_of_caller
from dcpring.watch import events as _trace

__all__ = ["RingSavePlanner"]

logger = logging.getLogger("dcpring")

_OF_ONE_SAVE = ("_save", "_state", "plan", "state_dict", "mappings", "global_plan", "metadata")


class RingSavePlanner(DefaultSavePlanner):
    """Plans a save in C: ``dcp.save(state_dict, storage_writer=..., planner=RingSavePlanner())``.

    Takes the arguments of ``DefaultSavePlanner`` and works wherever that does, with any storage. All ranks of a save
    must use it. A subclass that overrides ``create_local_plan``, ``create_global_plan`` or ``finish_plan`` plans item
    by item as DefaultSavePlanner does, and may change items in each. ``check_replicas``, ``split_bytes``, and all
    ``writers`` but "first_replica" have no effect then, which is logged once.

    What is raised reaches the caller of the save inside DCP's ``CheckpointException``.

    Args:
        flatten_state_dict: see ``DefaultSavePlanner``.
        flatten_sharded_tensors: likewise.
        dedup_replicated_tensors: likewise.
        dedup_save_to_lowest_rank: the same as ``writers="first_replica"``.
        enable_plan_caching: do not send a plan that is that of the last save with this planner (or a pickled copy).
            Any change is noticed: names, shapes, dtypes, layouts, order.
        writers: who writes what several ranks hold.

            - "balanced": all of them, shared out by bytes.
            - "split": the same, and large replicated tensors are cut along dimension 0, each holder writing a part.
            - "first_replica": as few ranks as one replica needs; the others make no file.
            - an int N: at most N ranks.
            - "per_node": at most one rank on each host.
            - "auto": "first_replica" on network, FUSE and cloud storage; else "balanced", or "split" where whole
              tensors cannot be shared out within 5 %.

        check_replicas: what to do when ranks hold different bytes of a replicated object or tensor (of those larger
            than 64 KiB a sample is compared): "warn", "error", or "off" (nothing is compared). But for "off" it is an
            error when ranks have spread different tensors of one name, each over some ranks only: stages of a pipeline
            whose layers are called alike.
        split_bytes: no part of a cut tensor is smaller than this many bytes.
        key_map: as for ``RingWriter``; give it to one of the two. With this one any storage gets the new names;
            RingWriter stores the map beside the checkpoint, as the coordinator used it.

    Raises:
        CheckpointError: ranks disagree about a key; chunks overlap or are missing; no allowed rank holds a shard.
    """

    @checks_names()
    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
        *,
        writers: Writers = "auto",
        check_replicas: Literal["warn", "error", "off"] = "warn",
        split_bytes: int = 4 << 20,
        key_map: KeyMapLike = None,
    ) -> None:
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            dedup_replicated_tensors=dedup_replicated_tensors,
            dedup_save_to_lowest_rank=dedup_save_to_lowest_rank,
            enable_plan_caching=enable_plan_caching,
        )
        strategy.check_writers(writers)
        if check_replicas not in ("warn", "error", "off"):
            raise ValueError(f'check_replicas={check_replicas!r}: must be "warn", "error" or "off"')
        if not isinstance(split_bytes, int) or split_bytes < 1:
            raise ValueError(f"split_bytes={split_bytes!r}: must be an int from 1")
        if writers == "first_replica":
            self.dedup_save_to_lowest_rank = True
        self.writers: Writers = "first_replica" if dedup_save_to_lowest_rank and writers == "auto" else writers
        self.check_replicas = check_replicas
        self.split_bytes = split_bytes
        self.key_map = None if key_map is None else KeyMap(key_map)
        self._plan_caching = enable_plan_caching
        self._cache_key = f"dcpring-{uuid.uuid4()}"
        keep_plans_apart(self, self._cache_key)
        self._save, self._state = Save(), Flat()
        self._ranks = ranks_now()
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return shown(self, writers=self.writers, check_replicas=self.check_replicas, split_bytes=self.split_bytes)

    def __getstate__(self) -> dict[str, Any]:
        """Of a save nothing is pickled: DCP's background process gets a copy of the planner for each."""
        return {name: value for name, value in self.__dict__.items() if name not in _OF_ONE_SAVE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._save, self._state = Save(), Flat()

    # ---- what DCP calls, in this order ----

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._save = save = run_of(storage_meta, Save)
        if save is not getattr(storage_meta, "run", None):  # and a writer of ours does not look
            wait_for_turn()
            require_group(*self._ranks)
            save.path = None if storage_meta is None else storage_meta.checkpoint_id
        save.events.begin(_trace.LOCAL_PLAN)
        flat = self._flat(state_dict)
        if flat.renamed and is_coordinator:
            _warn_of_keys(flat.renamed)
        if self.flatten_sharded_tensors:
            flat = open_sharded_tensors(flat)
        if self.key_map is not None:
            key_map = one_map(save.key_map, self.key_map)
            names = key_map.rename(flat.values)
            flat, save.key_table = rename_flat(flat, names), key_map.used(names)
        self._state, self.state_dict, self.mappings = flat, flat.values, flat.mappings
        self.is_coordinator = save.events.is_coordinator = is_coordinator

    def _flat(self, state_dict: STATE_DICT_TYPE) -> Flat:
        if self.flatten_state_dict:
            return flatten(state_dict)
        return Flat(values=dict(state_dict), codes=[b""] * len(state_dict))

    def create_local_plan(self) -> SavePlan:
        with self._save.events.step(_trace.LOCAL_PLAN):
            self.plan = self._plan_locally()
            self._save.events.wait_for_plans()
        return self.plan

    def _plan_locally(self) -> SavePlan:
        if self._plans_by_items:
            versions.say_once(logging.INFO, f"{_by_items(self).reason}: ranks' items are sent, which takes longer")
            items = own_items(make_table(self._described()))
            return SavePlan(items, planner_data=self.mappings if self.flatten_state_dict else None)
        compared = world_size() > 1 and self.check_replicas != "off"
        save, flat = self._save, self._described()
        table = make_table(flat, hashed=replicas.is_hashed if compared else None)
        ties = tied_rows(flat, table) if world_size() > 1 else ()
        prints = _fingerprints(table, flat) if compared else b""
        meshes = replicas.partial_meshes(flat.values.values()) if prints else ()
        layout = table.encode()
        save.table, save.digest = table, hashlib.blake2b(layout + repr(ties).encode(), digest_size=16).hexdigest()
        sent = None if self._cache is not None and self._cache.may_skip(save.digest) else layout
        told = rank_here(), host_id(), sent, save.digest, prints, self.flatten_state_dict, ties, meshes
        return RingPlan(Items(table), message=LocalMessage(*told), values=flat.values)  # type: ignore[arg-type]

    def _described(self) -> Flat:
        """What is planned: the state dict, or what a subclass has put in its place."""
        if self.state_dict is self._state.values:
            return self._state
        return Flat(self.state_dict, self.mappings, [path_code(self.mappings, name) for name in self.state_dict])

    @property
    def _plans_by_items(self) -> bool:
        """Whether a subclass may change items, so that plans are made of DCP's own."""
        methods = ("create_local_plan", "create_global_plan", "finish_plan")
        return overrides(self, (RingSavePlanner,), methods)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        with self._save.events.step(_trace.GLOBAL_PLAN):
            if self._plans_by_items:
                plans, metadata = super().create_global_plan(all_plans)
            else:
                plans, metadata = self._plan_by_tables(all_plans)
            self.global_plan, self.metadata = plans, metadata
            if not self._save.events.is_sure:  # RingWriter has a part in the global plan, and says when it is over
                self._save.events.begin(_trace.SCATTER_PLANS)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        with self._save.events.step():
            self.plan = self._finish_plan(new_plan)
            self._save.events.begin(_trace.WRITE)
        return self.plan

    def _finish_plan(self, new_plan: SavePlan) -> SavePlan:
        save = self._save
        if self._plans_by_items:
            plan = super().finish_plan(new_plan)
            save.report = _report_by_items(self, plan)
            return plan
        message = new_plan.received(Reply, _OWN) if isinstance(new_plan, RingPlan) else None
        if message is None or save.table is None:
            raise CheckpointError(f"{_OWN}: the coordinator does not plan with RingSavePlanner; {_ON_ALL}")
        cache = self._cache
        items = Items(save.table, message.kept if cache is None else cache.finish(save.digest, message.kept))
        save.cuts = _cuts_of(items)
        if not save.report.ranks:
            save.report = PlanReport(str(message.choice.writers), message.choice.reason, [message.rank])
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("save plan of rank %d: %s", message.rank.rank, save.timed_report().summary())
        return RingPlan(items, new_plan.storage_data, new_plan.planner_data)  # type: ignore[arg-type]

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What an item stands for; for a part of a tensor that was cut, or is in several chunks, a view."""
        cut = self._save.cuts.get((index.fqn, index.offset))
        chunk = index if cut is None else cut[0]
        part = part_of(self.state_dict, chunk)
        found = super().lookup_object(chunk) if part is None else part
        return found if cut is None else found.narrow(0, *cut[1:])

    # ---- the coordinator ----

    @property
    def _cache(self) -> PlanCache | None:
        """What is kept between saves; None without plan caching."""
        return cache_of(self._cache_key) if self._plan_caching else None

    def _plan_by_tables(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        messages, cache = [_message(rank, plan) for rank, plan in enumerate(all_plans)], self._cache
        layouts: list[Any] = [message.layout for message in messages]
        if cache is not None:
            layouts = cache.restore(messages)
        outcome = self._outcome(messages, layouts, cache)
        kept: Sequence[bytes | None] = outcome.replies
        if cache is not None:
            kept = cache.keep(layouts, messages, outcome)
        plans: list[SavePlan] = []
        for rank, plan in enumerate(all_plans):
            items: Any = Items(layouts[rank], outcome.replies[rank])
            reply = Reply(kept[rank], outcome.choice, outcome.ranks[rank])
            plans.append(RingPlan(items, plan.storage_data, plan.planner_data, message=reply))
        self._note_plan(messages, outcome.choice, outcome.ranks, plans)
        flattened = any(message.flattened for message in messages)
        return plans, LazyMetadata(source=Chunks(outcome.table, flattened, items=outcome.items))

    def _outcome(self, messages: list[LocalMessage], layouts: list[bytes], cache: PlanCache | None) -> Outcome:
        """Merges, checks and assigns; or the last save's outcome, where nothing has changed."""
        choice = strategy.choose(self.writers, self._save.path)
        wish = (choice.writers, self.split_bytes, tuple(message.host for message in messages))
        is_compared = any(message.fingerprints for message in messages)
        known = None if cache is None or is_compared else cache.known_outcome(messages, wish)
        if known is not None:
            return replace(known, choice=strategy.as_before(known.choice, choice))
        merge = self._merged(messages, layouts)
        if is_compared:
            self._compare_replicas(merge, messages)
        with _as_checkpoint_error(f"writers={choice.writers!r} is not possible here"):
            choice = strategy.assign(merge, choice, [message.host for message in messages], self.split_bytes)
        items, replies = zip(*((merge.items(rank), merge.reply(rank)) for rank in range(len(messages))), strict=True)
        ranks = [RankReport(rank, *sums) for rank, sums in enumerate(merge.sums())]
        return Outcome(choice, merge.table(), list(items), list(replies), ranks, wish)

    def _merged(self, messages: list[LocalMessage], layouts: list[bytes]) -> _C.Merge:
        merge = _C.Merge(len(messages))
        for message, layout in zip(messages, layouts, strict=True):
            with _as_checkpoint_error(f"the plan of rank {message.rank}"):
                merge.add(layout, message.fingerprints)
        with _as_checkpoint_error("Failed to validate global plan: the plans do not fit together"):
            for place, message in enumerate(messages):
                for row, first in message.ties:
                    merge.tie(place, row, first)
            merge.check(len(messages) > 1)
        return merge

    def _compare_replicas(self, merge: _C.Merge, messages: Sequence[LocalMessage]) -> None:
        text = replicas.differences(merge, messages)
        if text and self.check_replicas == "error":
            raise CheckpointError(text)
        if text and text not in self._warned:
            self._warned.add(text)
            logger.warning(text + about_ranks(text, members_of_caller()))

    def _note_plan(
        self, messages: list[LocalMessage], choice: Choice, ranks: list[RankReport], plans: list[Any]
    ) -> None:
        self._save.report = PlanReport(
            writers=str(choice.writers),
            reason=choice.reason,
            ranks=[replace(rank) for rank in ranks],
            gathered_bytes=sum(len(m.layout or b"") + len(m.fingerprints) for m in messages),
            scattered_bytes=sum(len(plan.message.kept or b"") for plan in plans if isinstance(plan.message, Reply)),
            cached=sum(message.layout is None for message in messages),
        )

    # ---- the report ----

    def report(self) -> PlanReport:
        """What the plan of the last save did that this process planned, so not one that DCP runs in another process.

        On the coordinator it covers all ranks, elsewhere this one.
        """
        return self._save.timed_report()


# ---- helpers ----


def _cuts_of(items: Items) -> dict[tuple[str, torch.Size | None], tuple[MetadataIndex, int, int]]:
    cuts: dict[tuple[str, torch.Size | None], tuple[MetadataIndex, int, int]] = {}
    for kept in items.kept:
        if isinstance(kept, int):
            continue
        number, start, count = kept
        whole, place = row_of(items.table, number), torch.Size(row_of(items.table, kept).offsets)
        cuts[whole.key, place] = (MetadataIndex(whole.key, whole.offsets), start, count)
    return cuts


def _by_items(planner: RingSavePlanner) -> Choice:
    return Choice("items", f"{type(planner).__qualname__} overrides how plans are made, and is planned item by item")


def _report_by_items(planner: RingSavePlanner, plan: SavePlan) -> PlanReport:
    chunks = (item.tensor_data for item in plan.items if item.tensor_data is not None)
    size = sum(math.prod(data.chunk.sizes) * data.properties.dtype.itemsize for data in chunks)
    choice = _by_items(planner)
    return PlanReport(str(choice.writers), choice.reason, [RankReport(rank_here(), len(plan.items), size)])


def _warn_of_keys(renamed: list[str]) -> None:
    """Says, once for the same mappings, that their keys will be others when they come back."""
    versions.say_once(
        logging.WARNING,
        f"the state dict has keys that are no strings, in {some_keys(renamed)}. DCP stores them as strings: a load "
        "into a state dict with the same keys fills its tensors, but one that makes the state dict from the checkpoint "
        'has "0" for 0, which Optimizer.load_state_dict takes for no parameter. Use dcpring.save() and '
        "dcpring.load() in one process, else dcpring.get_state_dict() or dcpring.Checkpointer",
    )


def makes_tensors(planner: SavePlanner) -> bool:
    """Whether ``resolve_data`` may make new tensors; the default ones hand out what is in the state dict."""
    methods = ("resolve_data", "transform_object", "lookup_object")
    return overrides(planner, (DefaultSavePlanner, RingSavePlanner), methods)


def _fingerprints(table: _C.Table, flat: Flat) -> bytes:
    names = [name for name, row in zip(table.names(), table.flags(), strict=True) if row & HASHED]
    return replicas.fingerprints([flat.values[name] for name in names])


_OWN = "this rank"
_ON_ALL = "pass planner=RingSavePlanner() on all ranks, or on none"


def _message(rank: int, plan: SavePlan) -> LocalMessage:
    if not isinstance(plan, RingPlan):
        raise CheckpointError(f"rank {rank} does not plan with RingSavePlanner, but the coordinator does; {_ON_ALL}")
    message: LocalMessage = plan.received(LocalMessage, f"rank {rank}")
    return message


@contextlib.contextmanager
def _as_checkpoint_error(what: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise PlanError(f"{what}: {error}") from error


def rename_flat(flat: Flat, names: Mapping[str, str]) -> Flat:
    """A flattened state dict under new names, with paths to match."""
    mappings = {names.get(old, old): new_path(path, old, names.get(old, old)) for old, path in flat.mappings.items()}
    values = {names[old]: value for old, value in flat.values.items()}
    return Flat(values, mappings, [path_code(mappings, name) for name in values])
