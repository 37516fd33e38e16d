"""RingSavePlanner: DCP's save planner with its work done in C.

Every rank describes what it holds as a compact table (``table``). The coordinator merges the tables, checks them,
gives each item a writer, and sends back a bitmap; DCP's objects are only made for storage that asks for them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import math
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from dcpring import _C
from dcpring.base.groups import GroupBefore, host_id, rank_here, saying_whose, whose_ranks, world_size
from dcpring.base.text import some_keys
from dcpring.errors import CheckpointError, PlanError
from dcpring.format.lazy import Chunks, LazyMetadata
from dcpring.names.key_map import KeyMap, KeyMapLike, new_path, one_map
from dcpring.options import overrides
from dcpring.plan import replicas, strategy
from dcpring.plan.flatten import Flat, flatten, open_sharded_tensors, path_code
from dcpring.plan.items import Items
from dcpring.plan.messages import ByItems, Cut, Cuts, Gathering, LocalMessage, Message, Reply, RingPlan, Unsealed
from dcpring.plan.outcome import Cache, Outcome, cache_of
from dcpring.plan.rows import row_of
from dcpring.plan.run import SaveRun, run_of
from dcpring.plan.strategy import Choice, Writers
from dcpring.plan.table import HASHED, NAME_ROW, make_table, part_of, table_of_items, tied_rows
from dcpring.report import PlanReport, RankReport
from dcpring.torchside import versions
from dcpring.torchside.dcp import keep_plans_apart
from dcpring.torchside.groups import members_of_caller
from dcpring.watch import phases as _trace

__all__ = ["RingSavePlanner"]

logger = logging.getLogger("dcpring")

_OF_ONE_SAVE = ("_save", "plan", "state_dict", "mappings", "global_plan", "metadata")


class RingSavePlanner(DefaultSavePlanner):
    """Plans a save in C: ``dcp.save(state_dict, storage_writer=..., planner=RingSavePlanner())``.

    Takes the arguments of ``DefaultSavePlanner`` and works wherever that does, with any storage. All ranks of a save
    must use it. Subclasses may change the items of plans, in each of the methods that make or get plans. Where
    ``create_global_plan`` is given others than the ranks have planned, that save is planned as DefaultSavePlanner
    does, by ``dedup_save_to_lowest_rank``; of the other values of ``writers`` only "first_replica" counts then.

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
        self.writers: Writers = "first_replica" if dedup_save_to_lowest_rank and writers == "auto" else writers
        self.check_replicas = check_replicas
        self.split_bytes = split_bytes
        self.key_map = None if key_map is None else KeyMap(key_map)
        self._plan_caching = enable_plan_caching
        self._cache_key = f"dcpring-{uuid.uuid4()}"
        keep_plans_apart(self, self._cache_key)
        self._save = _Save()
        self._group = GroupBefore()
        self._warned: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Of a save nothing is pickled: DCP's background process gets a copy of the planner for each."""
        return {name: value for name, value in self.__dict__.items() if name not in _OF_ONE_SAVE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._save = _Save()

    # ---- what DCP calls, in this order ----

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._save = _Save(run_of(storage_meta, SaveRun))
        if self._run is not getattr(storage_meta, "run", None):  # and a writer of ours does not look
            self._group.require()
        self._phases.begin(_trace.LOCAL_PLAN)
        self._save.flat = self._flat(state_dict)
        if self._save.flat.renamed and is_coordinator:
            _warn_of_keys(self._save.flat.renamed)
        if self.flatten_sharded_tensors:
            self._save.flat = open_sharded_tensors(self._save.flat)
        if self.key_map is not None:
            key_map = one_map(self._run.key_map, self.key_map)
            names = key_map.rename(self._save.flat.values)
            self._save.flat = rename_flat(self._save.flat, names)
            self._run.key_table = key_map.used(names)
        self.mappings = self._save.flat.mappings
        self.state_dict = self._save.flat.values
        self.is_coordinator = self._phases.is_coordinator = is_coordinator
        self._save.checkpoint = None if storage_meta is None else storage_meta.checkpoint_id

    def _flat(self, state_dict: STATE_DICT_TYPE) -> Flat:
        if self.flatten_state_dict:
            return flatten(state_dict)
        return Flat(values=dict(state_dict), codes=[b""] * len(state_dict))

    @_trace.step(_trace.LOCAL_PLAN, then=_trace.THE_PLANS)
    def create_local_plan(self) -> SavePlan:
        compared = world_size() > 1 and self.check_replicas != "off"
        flat = self._save.flat
        if self.state_dict is not flat.values:  # a subclass has put another in its place
            flat = Flat(self.state_dict, self.mappings, [path_code(self.mappings, name) for name in self.state_dict])
        table = make_table(flat, hashed=replicas.is_hashed if compared else None)
        if compared:
            self._save.fingerprints = _fingerprints(table, flat)
            self._save.meshes = replicas.partial_meshes(flat.values.values())
        self._save.ties = tied_rows(flat, table) if world_size() > 1 else ()
        items = Items(table)
        self.plan = RingPlan(items, seal=self._seal, values=flat.values, described=items)  # type: ignore[arg-type]
        layout_of = functools.partial(RingSavePlanner._layout_of, weakref.proxy(self))  # no cycle keeps tensors alive
        self._save.gathering = Gathering(layout_of) if self.is_coordinator else None
        return self.plan

    def _seal(self, plan: RingPlan) -> LocalMessage:
        """Describes the items as they are now: a subclass may have changed those that create_local_plan made."""
        if plan.described is not None and not plan.is_changed:
            table, items, fingerprints, ties = plan.described.table, None, self._save.fingerprints, self._save.ties
        else:
            items = list(plan.items)
            table = table_of_items(items, self.mappings if self.flatten_state_dict else None)
            fingerprints, ties = b"", ()
        meshes = self._save.meshes if fingerprints else ()
        layout = table.encode()
        digest = hashlib.blake2b(layout + repr(ties).encode(), digest_size=16).hexdigest()
        self._save.sent = _Sent(table, items, digest)
        known = self._plan_caching and self._cache.may_skip(digest)
        return LocalMessage(
            rank_here(),
            host_id(),
            None if known else layout,
            digest,
            fingerprints,
            self.flatten_state_dict,
            ties,
            meshes,
        )

    @_trace.step(_trace.GLOBAL_PLAN)
    @saying_whose()
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        messages = _messages(all_plans, self._end_gathering())
        if messages is None or _are_changed(all_plans, messages):
            plans, metadata = self._plan_by_items(all_plans, messages or [])
        else:
            plans, metadata = self._plan_by_tables(all_plans, messages)
        self.global_plan, self.metadata = plans, metadata
        if not self._phases.is_sure:  # RingWriter has a part in the global plan, and says itself when it is over
            self._phases.begin(_trace.SCATTER_PLANS)
        return plans, metadata

    @_trace.step()
    @saying_whose()
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._end_gathering()
        message = getattr(new_plan, "message", None)
        if isinstance(new_plan, RingPlan) and isinstance(message, (Reply, Unsealed)):
            message = new_plan.sealed()
        if isinstance(message, Reply) and self._save.sent is not None:
            _check_addressee(message)
            kept = self._cache.finish(self._save.sent.digest, message.kept)
            items = self._save.sent.items(kept)
            self._save.cuts = _cuts_of(items)
        else:
            items = list(new_plan.items)
            self._save.cuts = message.cuts if isinstance(message, ByItems) else {}
            self._check_held(items)
            if not isinstance(message, ByItems):
                self.plan = super().finish_plan(new_plan)  # a subclass has planned by itself
                return self.plan
        self._phases.begin(_trace.WRITE)
        self.plan = RingPlan(items, new_plan.storage_data, new_plan.planner_data)
        if not self._run.report.ranks:
            self._run.report = PlanReport(str(message.choice.writers), message.choice.reason, [message.rank])
        self._run.note_seconds()
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("save plan of rank %d: %s", self._run.report.ranks[0].rank, self._run.report.summary())
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What an item stands for; for a part of a tensor that was cut, or is in several chunks, a view."""
        cut = self._save.cuts.get((index.fqn, index.offset))
        chunk = index if cut is None else cut[0]
        part = part_of(self.state_dict, chunk)
        found = super().lookup_object(chunk) if part is None else part
        return found if cut is None else found.narrow(0, *cut[1:])

    def _check_held(self, items: list[WriteItem]) -> None:
        """Refuses items that this rank does not hold, unless a subclass looks them up by itself."""
        sent = self._save.sent
        if sent is None or makes_tensors(self):
            return
        held = {(row[0], row[3]): row[4] for row in map(sent.table.row, _stored_rows(sent.table))}
        for item in items:
            name, data = item.index.fqn, item.tensor_data
            offsets, lengths = ((), ()) if data is None else (tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            cut = self._save.cuts.get((name, item.index.offset))
            if cut is None:
                is_held = held.get((name, offsets)) == lengths
            else:
                chunk, start, rows = cut
                is_held = start + rows <= held.get((name, tuple(chunk.offset or ())), (0,))[0]
            if not is_held:
                what = f"{list(lengths)} from {list(offsets)} on of {name!r}" if offsets else repr(name)
                raise CheckpointError(
                    f"create_global_plan lets rank {rank_here()} write {what}, which that rank does not hold; give "
                    "items only to ranks that have planned them, or override lookup_object"
                )

    # ---- the coordinator ----

    @property
    def _cache(self) -> Cache:
        """What is kept between saves; with no plan caching nothing."""
        return cache_of(self._cache_key) if self._plan_caching else Cache()

    def _layout_of(self, message: LocalMessage | Unsealed) -> bytes:
        if isinstance(message, Unsealed):
            raise CheckpointError(message.why)
        return self._cache.layout_of(message)

    def _end_gathering(self) -> list[LocalMessage | Unsealed]:
        gathering, self._save.gathering = self._save.gathering, None
        return [] if gathering is None else gathering.messages

    def _plan_by_tables(
        self, all_plans: list[SavePlan], messages: list[LocalMessage]
    ) -> tuple[list[SavePlan], Metadata]:
        cache = self._cache
        layouts = cache.restore(messages)
        outcome = self._outcome(messages, layouts, cache)
        items = [Items(layout, reply) for layout, reply in zip(layouts, outcome.replies, strict=True)]
        plans: list[SavePlan] = []
        for rank, plan in enumerate(all_plans):
            known = cache.has_reply(rank, messages, outcome)
            kept = None if known else outcome.replies[rank]
            replied = RingPlan(
                items[rank],  # type: ignore[arg-type]
                plan.storage_data,
                plan.planner_data,
                message=Reply(messages[rank].rank, kept, outcome.choice, outcome.ranks[rank]),
                seal=functools.partial(RingSavePlanner._seal_reply, weakref.proxy(self), rank, items),
                described=items[rank],
            )
            plans.append(replied)
        cache.keep(layouts, messages, outcome)
        self._note_plan(messages, outcome.choice, outcome.ranks, plans)
        flattened = any(message.flattened for message in messages)
        return plans, LazyMetadata(source=Chunks(outcome.table, flattened, items=outcome.items))

    def _seal_reply(self, rank: int, planned: list[Items], plan: RingPlan) -> Message:
        """What a rank is sent: the reply, or the items as they are now if a subclass has changed them."""
        if not plan.is_changed:
            assert plan.message is not None
            return plan.message
        self._say_by_items()
        items = list(plan.items)
        wanted = {(item.index.fqn, item.index.offset) for item in items}
        cuts = {place: cut for each in planned for place, cut in _cuts_of(each).items() if place in wanted}
        own, report = self._run.report.ranks[rank], self._run.report
        report.ranks[rank] = replace(own, items=len(items), bytes=_tensor_bytes(items))
        report.writers, report.reason = str(_BY_ITEMS.writers), _BY_ITEMS.reason
        return ByItems(_BY_ITEMS, replace(report.ranks[rank]), cuts)

    def _plan_by_items(
        self, all_plans: list[SavePlan], messages: list[LocalMessage]
    ) -> tuple[list[SavePlan], Metadata]:
        """As stock does it: a subclass has put items of its own into the plans."""
        self._say_by_items()
        if any(message.fingerprints for message in messages):
            with contextlib.suppress(PlanError):  # the plans that the subclass has changed need not have fitted
                self._compare_replicas(self._merged(messages, self._cache.restore(messages)), messages)
        lowest = self.dedup_save_to_lowest_rank or self.writers == "first_replica"
        stock = DefaultSavePlanner(self.flatten_state_dict, dedup_save_to_lowest_rank=lowest)
        given = [SavePlan(list(plan.items), planner_data={}) for plan in all_plans]
        given[0] = replace(given[0], planner_data=self._paths(messages))
        try:
            planned, metadata = stock.create_global_plan(given)
        except (ValueError, AssertionError) as error:
            raise PlanError(f"the items that create_global_plan was given do not fit together: {error}") from error
        ranks = [_report_of(rank, *items) for rank, items in enumerate(zip(given, planned, strict=True))]
        plans: list[SavePlan] = [
            RingPlan(new.items, old.storage_data, old.planner_data, message=ByItems(_BY_ITEMS, rank, {}))
            for new, old, rank in zip(planned, all_plans, ranks, strict=True)
        ]
        self._note_plan(messages, _BY_ITEMS, ranks, plans)
        return plans, metadata

    def _say_by_items(self) -> None:
        versions.say_once(
            logging.INFO,
            f"create_global_plan of {self.__class__.__qualname__} changes items: such saves are planned item by item, "
            "as by DefaultSavePlanner, which takes longer",
        )

    def _paths(self, messages: list[LocalMessage]) -> dict[str, Any]:
        """Where the names of all ranks belong in nested state dicts."""
        paths: dict[str, Any] = dict(self.mappings)
        own = "" if self._save.sent is None else self._save.sent.digest
        for message in {message.digest: message for message in messages}.values():
            if message.flattened and message.digest != own:
                paths |= Chunks(_C.decode_table(self._layout_of(message)), True).load().planner_data or {}
        return paths

    def _outcome(self, messages: list[LocalMessage], layouts: list[bytes], cache: Cache) -> Outcome:
        """Merges, checks and assigns; or the last save's outcome, where nothing has changed."""
        choice = strategy.choose(self.writers, self._save.checkpoint)
        wish = (choice.writers, self.split_bytes, tuple(message.host for message in messages))
        if not any(message.fingerprints for message in messages):
            known = cache.known_outcome(messages, wish)
            if known is not None:
                return replace(known, choice=strategy.as_before(known.choice, choice))
        merge = self._merged(messages, layouts)
        self._compare_replicas(merge, messages)
        with _as_checkpoint_error(f"writers={choice.writers!r} is not possible here"):
            choice = strategy.assign(merge, choice, [message.host for message in messages], self.split_bytes)
        return Outcome.of(merge, choice, wish)

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
            logger.warning(text + whose_ranks(members_of_caller()))

    def _note_plan(
        self, messages: list[LocalMessage], choice: Choice, ranks: list[RankReport], plans: list[Any]
    ) -> None:
        self._run.report = PlanReport(
            writers=str(choice.writers),
            reason=choice.reason,
            ranks=[replace(rank) for rank in ranks],
            gathered_bytes=sum(len(m.layout or b"") + len(m.fingerprints) for m in messages),
            scattered_bytes=sum(len(plan.message.kept or b"") for plan in plans if isinstance(plan.message, Reply)),
            cached=sum(message.layout is None for message in messages),
        )

    # ---- the report ----

    @property
    def _run(self) -> SaveRun:
        return self._save.run

    @property
    def _phases(self) -> _trace.Phases:
        return self._save.run.phases

    def report(self) -> PlanReport:
        """What the plan of the last save did that this process planned, so not one that DCP runs in another process.

        On the coordinator it covers all ranks, elsewhere this one.
        """
        return self._run.report


# ---- what belongs to one save ----


@dataclass
class _Sent:
    """What this rank has sent: the table, and the items it was made from where a subclass made them."""

    table: _C.Table
    own_items: list[WriteItem] | None
    digest: str

    def items(self, reply: bytes) -> Any:
        """The items that the reply leaves to this rank."""
        planned = Items(self.table, reply)
        if self.own_items is None:
            return planned
        by_row = {row: item for row, item in zip(_stored_rows(self.table), self._in_rows(), strict=True)}
        made = planned.made
        return [by_row[kept] if isinstance(kept, int) else item for kept, item in zip(planned.kept, made, strict=True)]

    def _in_rows(self) -> list[WriteItem]:
        """The own items in the order of the table's rows: those of one name follow each other."""
        assert self.own_items is not None
        order = {name: place for place, name in enumerate(dict.fromkeys(item.index.fqn for item in self.own_items))}
        return sorted(self.own_items, key=lambda item: order[item.index.fqn])


def _stored_rows(table: _C.Table) -> list[int]:
    return [row for row, kind in enumerate(table.types()) if kind != NAME_ROW]


@dataclass
class _Save:
    """What a planner alone knows of the save it is at.

    Attributes:
        run: the storage's.
        flat: the state dict.
        fingerprints: of the rows that are hashed.
        meshes: that do not have all ranks, of tensors of such rows.
        ties: rows that are the same memory.
        sent: None before the plan has been sent.
        cuts: parts of tensors that this rank writes.
        gathering: on the coordinator, until it has made the global plan.
        checkpoint: where the checkpoint goes, None where the storage does not say.
    """

    run: SaveRun = field(default_factory=SaveRun)
    flat: Flat = field(default_factory=Flat)
    fingerprints: bytes = b""
    meshes: tuple[tuple[int, ...], ...] = ()
    ties: tuple[tuple[int, int], ...] = ()
    sent: _Sent | None = None
    cuts: Cuts = field(default_factory=dict)
    gathering: Gathering | None = None
    checkpoint: Any = None


# ---- helpers ----


def _cuts_of(items: Any) -> dict[tuple[str, torch.Size | None], Cut]:
    if not isinstance(items, Items):
        return {}
    cuts: dict[tuple[str, torch.Size | None], Cut] = {}
    for kept in items.kept:
        if isinstance(kept, int):
            continue
        number, start, count = kept
        whole, place = row_of(items.table, number), torch.Size(row_of(items.table, kept).offsets)
        cuts[whole.key, place] = (MetadataIndex(whole.key, whole.offsets), start, count)
    return cuts


_BY_ITEMS = Choice("items", "create_global_plan has changed items")


def _report_of(rank: int, given: SavePlan, planned: SavePlan) -> RankReport:
    size = _tensor_bytes(planned.items)
    removed = len(given.items) - len(planned.items), _tensor_bytes(given.items) - size
    return RankReport(rank, len(planned.items), size, *removed)


def _tensor_bytes(items: Sequence[WriteItem]) -> int:
    chunks = (item.tensor_data for item in items if item.tensor_data is not None)
    return sum(math.prod(data.chunk.sizes) * data.properties.dtype.itemsize for data in chunks)


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


def _messages(plans: list[SavePlan], gathered: list[LocalMessage | Unsealed]) -> list[LocalMessage] | None:
    """What ranks have sent, or would have; None for the only rank, of which a subclass has made another plan.

    Args:
        plans: of all ranks, with the items that they have planned or others.
        gathered: what has come from other processes, by rank.
    """
    others = [rank for rank, plan in enumerate(plans) if not isinstance(plan, RingPlan)]
    if len(plans) == 1 and others and not gathered:
        return None
    if others and len(gathered) != len(plans):
        raise CheckpointError(
            f"rank {others[0]} does not plan with RingSavePlanner, but the coordinator does; "
            "pass planner=RingSavePlanner() on all ranks, or on none"
        )
    if gathered and len(gathered) != len(plans):
        raise PlanError(
            f"create_global_plan was given {len(plans)} plans for {len(gathered)} ranks; give it one for each"
        )
    return [_message(rank, made) for rank, made in enumerate(gathered or plans)]


def _message(rank: int, made: Any) -> LocalMessage:
    try:
        message = made.sealed() if isinstance(made, RingPlan) else made
        if isinstance(message, Unsealed):
            raise CheckpointError(message.why)
    except CheckpointError as error:
        raise CheckpointError(f"rank {rank}: {error}") from error
    assert isinstance(message, LocalMessage)
    return message


def _are_changed(plans: list[SavePlan], messages: list[LocalMessage]) -> bool:
    """Whether any plan has other items than the rank has planned. One that was not sent is described by what it has."""
    return any(
        not isinstance(plan, RingPlan) or (plan.seal is None and (plan.is_changed or plan.message is not message))
        for plan, message in zip(plans, messages, strict=True)
    )


def _check_addressee(reply: Reply) -> None:
    if reply.to != rank_here():
        raise CheckpointError(
            f"create_global_plan lets rank {rank_here()} follow the plan that was made for rank {reply.to}; move items "
            "from plan to plan instead, with dataclasses.replace(plan, items=...)"
        )


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
