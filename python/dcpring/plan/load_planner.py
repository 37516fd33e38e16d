"""RingLoadPlanner: DCP's load planner with its work done in C.

What a rank wants and what the checkpoint holds are tables (``table``); the core matches them. DCP's ``ReadItem``
objects are only made for storage that asks for them, and nothing is sent to the coordinator but what it needs.
"""

from __future__ import annotations

import array
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from dcpring import _C
from dcpring.base.arguments import checks_names, shown
from dcpring.base.groups import host_id, rank_here, rank_in
from dcpring.base.text import some, spans
from dcpring.errors import KeyMismatchError
from dcpring.format.lazy import Chunks, LazyMetadata
from dcpring.format.metadata import TENSOR
from dcpring.format.properties import dtypes_of
from dcpring.names.key_map import KeyMap, KeyMapLike, one_map, rename_metadata
from dcpring.names.policy import LoadPolicy, Missing, Unexpected, match_names
from dcpring.options import overrides
from dcpring.plan import strategy
from dcpring.plan.flatten import Flat, flatten
from dcpring.plan.items import ReadItems
from dcpring.plan.messages import fields_of, rebuilt
from dcpring.plan.pieces import Piece, covering, cut
from dcpring.plan.rows import row_of
from dcpring.plan.run import Load, run_of
from dcpring.plan.sharing import Needs, Share, Sharing, are_those_of, plan_sharing, refuse_group, units_table
from dcpring.plan.table import make_table, memory_of_rows, part_of, rows_of_stored, rows_to_fill
from dcpring.report import LoadReport, ReadReport
from dcpring.torchside.dcp import init_state_dict, names_as_2_3, set_element
from dcpring.torchside.tensors import ShardedTensor
from dcpring.torchside.versions import say_once
from dcpring.watch import events as _trace

__all__ = ["RingLoadPlanner"]

logger = logging.getLogger("dcpring")


@dataclass
class RingLoadPlan(LoadPlan):
    """A LoadPlan whose items stay in C, and on their rank: pickled, it holds what peer sharing needs.

    Attributes:
        chunks: the checkpoint's; only on its own rank.
        reads: the rank's part of the report.
        source: of which save the rank has read the metadata, and where.
        needs: what the rank will read, where ranks share.
        sharing: the coordinator's reply to that.
        pieces: what each row of the needs stands for; only on its own rank.
    """

    chunks: Chunks | None = field(default=None, repr=False)
    reads: ReadReport | None = None
    source: tuple[str, str] | None = None
    needs: Needs | None = field(default=None, repr=False)
    sharing: Sharing | None = field(default=None, repr=False)
    pieces: list[Piece] = field(default_factory=list, repr=False)

    @property
    def is_compact(self) -> bool:
        """Whether the core knows where all of it is stored."""
        return self.chunks is not None and self.chunks.storage is not None

    def __reduce__(self) -> tuple[Any, ...]:
        sent = {name: getattr(self, name) for name in ("reads", "source", "needs", "sharing")}
        return rebuilt, (RingLoadPlan, {**fields_of(self, LoadPlan), "items": [], **sent})


class RingLoadPlanner(DefaultLoadPlanner):
    """Plans a load in C: ``dcp.load(state_dict, storage_reader=..., planner=RingLoadPlanner())``.

    Takes the arguments of ``DefaultLoadPlanner`` and works wherever that does, with any storage.

    What is raised reaches the caller of the load inside DCP's ``CheckpointException``, with the errors of all ranks.

    Args:
        flatten_state_dict: see ``DefaultLoadPlanner``.
        flatten_sharded_tensors: likewise.
        allow_partial_load: likewise.
        process_group: the ranks of the load, which read once what several of them need. Without it every rank
            reads for itself, as it does from storage other than ``RingReader``, and from checkpoints that RingWriter
            and RingSavePlanner have not written together.
        share: with a process group, read each byte of a tensor

            - "auto": as "host" where the checkpoint is on network, FUSE or cloud storage. On a local disk a direct read
              costs less than sharing: there only what would be read in full for some columns of it is shared;
            - "host": once on every host, and share it through shared memory, of some 108 MiB;
            - "all": once in all, and send it to other hosts through the process group as well;
            - "off": on every rank that needs it.

            Ranks share if all come to do so within some seconds of each other, else each reads for itself.
        key_map: as for ``RingReader``; give it to one of the two. The planner sees both sides: with "normalize" it
            also finds names that text alone leaves ambiguous.
        missing: what to do about keys that the checkpoint lacks: "error", "warn" or "allow" (which is what
            ``allow_partial_load`` means). Tied tensors need one of their names only.
        allow_missing: shell patterns (``fnmatch``) of keys that may be missing in any case.
        unexpected: what to do about keys that the state dict lacks: "log" (at INFO), "warn", "error" or "ignore".

    Raises:
        KeyMismatchError: keys are missing or unexpected, or shapes differ; the message lists all of them, each with the
            closest candidate and the likely cause. It is a RuntimeError and a ValueError.
        ValueError: the checkpoint does not hold all of a tensor.
    """

    @checks_names()
    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        process_group: dist.ProcessGroup | None = None,
        share: Share = "auto",
        key_map: KeyMapLike = None,
        missing: Missing = "error",
        allow_missing: str | Sequence[str] = (),
        unexpected: Unexpected = "log",
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        self.key_map = None if key_map is None else KeyMap(key_map)
        if allow_partial_load and missing == "error":
            missing = "allow"
        self.policy = LoadPolicy(missing, allow_missing, unexpected)
        self._names: dict[str, str] = {}
        if share not in ("auto", "host", "all", "off"):
            raise ValueError(f'share={share!r}: must be "auto", "host", "all" or "off"')
        self.process_group = process_group
        self.share = share
        self._own_plan: RingLoadPlan | None = None
        self._load = Load()

    def __repr__(self) -> str:
        missing = {"missing": self.policy.missing, "allow_missing": self.policy.allow_missing}
        return shown(self, share=self.share, **missing, unexpected=self.policy.unexpected)

    # ---- what DCP calls, in this order ----

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._load = run_of(None if metadata is None else metadata.storage_meta, Load)
        self._own_plan = None
        flat = self._flat(state_dict)
        if _has_meta(flat.values.values()):
            init_state_dict(state_dict)
            flat = self._flat(state_dict)
        kinds = set(map(type, flat.values.values()))
        if self.flatten_sharded_tensors and any(issubclass(kind, ShardedTensor) for kind in kinds):
            super().set_up_planner(state_dict, metadata, is_coordinator)
            return
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = flat.values, flat.mappings
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def _explain(self, error: ValueError | None = None) -> None:
        """Raises what the policy makes of all differences; returns when it allows them, or has no word for them."""
        assert self.metadata is not None
        metadata = self._load.stored or self.metadata
        if self._names:
            metadata = rename_metadata(metadata, self._names, storage=False)
        try:
            self.policy.check(self.state_dict, metadata, rank_here())
        except KeyMismatchError as mismatch:
            raise mismatch from error

    def _renamed(self, chunks: Chunks) -> dict[str, Any]:
        """What is wanted, under the checkpoint's names: here alone a key map is applied that RingLoadPlanner knows."""
        self._names = {}
        if self._load.key_map is None and self.key_map is None:
            return self.state_dict
        key_map = one_map(self._load.key_map, self.key_map)
        self._names = match_names(key_map, list(self.state_dict), list(dict.fromkeys(chunks.table.names())))
        stored = {new: old for old, new in self._names.items()}
        return {stored[name]: value for name, value in self.state_dict.items() if name in stored}

    def create_local_plan(self) -> LoadPlan:
        with self._events.step():
            return self._plan_by_match()

    def _plan_by_match(self) -> LoadPlan:
        assert self.metadata is not None
        chunks = _chunks_of(self._load.stored or self.metadata)
        values = self._renamed(chunks)
        wanted = make_table(Flat(values, {}, [b""] * len(values)), rows_of=rows_to_fill)
        try:
            match = _C.Match(wanted, chunks.table)
        except ValueError as error:
            self._explain(error)
            raise
        missing = match.missing() or len(values) < len(self.state_dict)
        if missing and self._is_of_version_2_3(chunks):
            return super().create_local_plan()
        if missing and self.policy.missing != "allow":
            self._explain()
        else:
            self._report_unexpected(chunks)
        self._load.goes_by_stored = self._load.stored is not None
        items: Any = ReadItems(match, wanted, chunks.table, self._names)
        reads = _reads(match, chunks, self.process_group)
        self._load.reported_rank = None if reads is None else reads.rank
        self._own_plan = RingLoadPlan(items, chunks=chunks, reads=reads, source=self._load.source)
        self._add_needs(self._own_plan)
        return self._own_plan

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        with self._events.step(_trace.GLOBAL_PLAN):
            return self._share_out(global_plan)

    def _share_out(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        _warn_of_several(global_plan)
        reads = [plan.reads for plan in global_plan if isinstance(plan, RingLoadPlan) and plan.reads is not None]
        self._load.report = LoadReport(ranks=[replace(read, rank=rank) for rank, read in enumerate(reads)])
        needs = [plan.needs for plan in global_plan if isinstance(plan, RingLoadPlan) and plan.needs is not None]
        if len(needs) < 2 or len(needs) < len(global_plan):
            return [_reply(plan, None) for plan in global_plan]
        if not are_those_of(needs):
            if self.share != "auto":
                refuse_group(needs)
            return [_reply(plan, None) for plan in global_plan]
        sharing = plan_sharing(needs)
        self._load.report.share = needs[0].share if sharing[0].rounds else "off"
        return [_reply(plan, part) for plan, part in zip(global_plan, sharing, strict=True)]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        with self._events.step(_trace.READ):
            return self._finished(new_plan)

    def _finished(self, new_plan: LoadPlan) -> LoadPlan:
        if self._own_plan is None or not isinstance(new_plan, RingLoadPlan):
            return new_plan
        self._own_plan.storage_data = new_plan.storage_data
        self._own_plan.sharing = new_plan.sharing
        if not self.is_coordinator:
            is_shared = self._own_plan.needs and new_plan.sharing and new_plan.sharing.rounds
            share = self._own_plan.needs.share if self._own_plan.needs and is_shared else "off"
            self._load.report = LoadReport(share, [self._own_plan.reads] if self._own_plan.reads else [])
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("load plan: %s", self._load.report.summary())
        return self._own_plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """What an item is read into; of a tensor that is in several chunks on this rank, the view of one."""
        part = part_of(self.state_dict, index)
        return super().lookup_tensor(index) if part is None else part

    # ---- the report ----

    def report(self) -> LoadReport:
        """What the last load's plan did. On the coordinator it covers all ranks, elsewhere this one."""
        return self._load.report

    @property
    def _events(self) -> _trace.Events:
        return self._load.events

    # ---- for RingReader ----

    @property
    def takes_objects(self) -> bool:
        """Whether ``load_object`` does what ``load_bytes`` does: not in a subclass that has its own."""
        return not overrides(self, (DefaultLoadPlanner, RingLoadPlanner), ("load_bytes",))

    def load_object(self, read_item: ReadItem, value: Any) -> None:
        """As ``load_bytes``, of what has been unpickled already."""
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], value)
        else:
            self.state_dict[name] = value

    def targets(self, wanted: _C.Table) -> list[Tensor | None]:
        """What each wanted row is filled into; None for what only ``resolve_tensor`` can tell."""
        if not self._names:
            return memory_of_rows(wanted, self.state_dict)
        return memory_of_rows(wanted, {name: self.state_dict[self._names[name]] for name in wanted.names()})

    # ---- helpers ----

    def _report_unexpected(self, chunks: Chunks) -> None:
        if self.policy.looks_at_unexpected:
            names = (name for name in chunks.table.names() if name not in self._load.made_of)
            stored = {self._names.get(name, name) for name in names}
            left = stored - self.state_dict.keys()
            self.policy.report(sorted(left), rank_here())

    def _add_needs(self, plan: RingLoadPlan) -> None:
        """Describes what this rank will read, where ranks are to share."""
        items: Any = plan.items
        group, storage = self.process_group, plan.chunks.storage if plan.chunks else None
        if group is None or storage is None or self.share == "off" or makes_tensors(self):
            return
        share = self._share()
        wanted = items.match.interleaved() if share == "off" else items.match.sizes()
        positions = self._same_as_stored(items, storage, [at for at, size in enumerate(wanted) if size])
        share = "host" if share == "off" else share
        plan.pieces = self._pieces(items, storage, positions)
        names = [self._name_of(piece, storage, share) for piece in plan.pieces]
        units = units_table(names, [piece.size_bytes for piece in plan.pieces])
        plan.needs = Needs(dist.get_rank(group), dist.get_world_size(group), host_id(), share, units)

    def _same_as_stored(self, items: ReadItems, storage: _C.StorageIndex, positions: list[int]) -> list[int]:
        """Those of the overlaps that are plain tensors and go into plain memory of the same dtype."""
        if not positions:
            return []
        dtypes = dtypes_of(items.stored)
        targets = self.targets(items.wanted)
        wanted, stored = (array.array("I", rows) for rows in (items.match.wanted_rows(), items.match.stored_rows()))
        return [at for at in positions if self._is_same(targets[wanted[at]], storage, stored[at], dtypes, items)]

    def _is_same(
        self, target: Tensor | None, storage: _C.StorageIndex, stored: int, dtypes: list[torch.dtype], items: ReadItems
    ) -> bool:
        place = storage.get(stored)
        if target is None or target.layout != torch.strided or place is None or place[1] != TENSOR:
            return False
        return target.dtype == dtypes[row_of(items.stored, stored).properties]

    def _pieces(self, items: ReadItems, storage: _C.StorageIndex, positions: list[int]) -> list[Piece]:
        """What is read for these overlaps, each once: pieces that other ranks may read as well."""
        found: dict[Piece, list[int]] = {}
        wider: set[Piece] = set()
        first: dict[tuple[str, int], int] = {}  # of tied tensors, which have one record, the first row
        sizes = [dtype.itemsize for dtype in dtypes_of(items.stored)]
        for position in positions:
            _, stored, _, offsets, lengths = items.match.get(position)
            record = row_of(items.stored, stored)
            shape, item_bytes = record.lengths, sizes[record.properties]
            box = covering(shape, offsets, lengths, item_bytes)
            place = storage.get(stored)
            assert place is not None
            whole = Piece(first.setdefault((place[0], place[2]), stored), shape, item_bytes, 0, 0, box)
            found.setdefault(whole, []).append(position)
            if box != (offsets, lengths):
                wider.add(whole)
        pieces: list[Piece] = []
        for whole, overlaps in found.items():
            place = storage.get(whole.row)
            assert place is not None
            whole = replace(whole, overlaps=tuple(overlaps), is_exact=whole not in wider)
            pieces.extend(cut(whole, place[4]))
        return pieces

    def _name_of(self, piece: Piece, storage: _C.StorageIndex, share: Share) -> str:
        """The same on all ranks that want the same bytes."""
        place = storage.get(piece.row)
        assert place is not None
        text = f"{place[0]}:{place[2]}:{piece}"
        return f"{host_id()}:{text}" if share == "host" else text

    @property
    def shares(self) -> bool:
        """Whether what several ranks need is to be read once."""
        return self.process_group is not None and self._share() != "off"

    def _share(self) -> Share:
        if self.share != "auto":
            return self.share
        about = getattr(self.metadata, "storage_meta", None)
        try:
            remote = strategy.remote_storage(about.checkpoint_id) if about and about.checkpoint_id else ""
        except (OSError, ValueError):
            remote = ""
        if remote and rank_in(self.process_group) == 0:
            say_once(logging.INFO, f"ranks of a host share what they read, as {remote}")
        return "host" if remote else "off"

    def _flat(self, state_dict: STATE_DICT_TYPE) -> Flat:
        if self.flatten_state_dict:
            return flatten(state_dict)
        return Flat(values=dict(state_dict))

    def _is_of_version_2_3(self, chunks: Chunks) -> bool:
        """Whether the keys are those of torch 2.3, which flattened in another way. DCP's planner reads these."""
        if not self.flatten_state_dict:
            return False
        old = names_as_2_3(self.original_state_dict) - self.state_dict.keys()
        return not old.isdisjoint(self._names.get(name, name) for name in chunks.table.names())


def _warn_of_several(plans: Sequence[LoadPlan]) -> None:
    """Says so where ranks load what several saves have written: each gets what it has named, as with torch."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, plan in enumerate(plans):
        if isinstance(plan, RingLoadPlan) and plan.source is not None:
            ranks.setdefault(plan.source, []).append(rank)
    if len({save_id for save_id, _ in ranks}) > 1:
        shown = [f"{path} (save {save_id[:8]}) on {spans(at)}" for (save_id, path), at in ranks.items()]
        logger.warning(
            "ranks load different checkpoints at a time: %s. A tensor that is sharded over these ranks is put together "
            "of parts of each. If that is not meant, give all ranks the same path, for instance rank 0's by "
            "dist.broadcast_object_list",
            some(shown, 4),
        )


def _reply(plan: LoadPlan, sharing: Sharing | None) -> LoadPlan:
    return replace(plan, needs=None, sharing=sharing) if isinstance(plan, RingLoadPlan) else plan


def _reads(match: _C.Match, chunks: Chunks, group: dist.ProcessGroup | None) -> ReadReport | None:
    """How much of what is wanted lies in files that a rank of this number, in the group or else in all, wrote."""
    if chunks.storage is None:
        return None
    rank = rank_in(group)
    files = match.file_bytes(chunks.storage)
    own = sum(count for file, count in files.items() if file.startswith(f"__{rank}_"))
    return ReadReport(rank, own, sum(files.values()) - own)


def makes_tensors(planner: LoadPlanner) -> bool:
    """Whether ``resolve_tensor`` may make new tensors; the default one hands out views of the state dict."""
    methods = ("resolve_tensor", "transform_tensor", "lookup_tensor", "commit_tensor")
    return overrides(planner, (DefaultLoadPlanner, RingLoadPlanner), methods)


def _chunks_of(metadata: Metadata) -> Chunks:
    chunks = metadata.chunks if isinstance(metadata, LazyMetadata) else None
    return chunks or Chunks(rows_of_stored(metadata), False)


def _has_meta(values: Iterable[Any]) -> bool:
    """Whether a tensor is on the meta device. A ShardedTensor of which this rank has no shard does not say."""
    tensors = (value for value in values if isinstance(value, Tensor) and not isinstance(value, ShardedTensor))
    return any(tensor.is_meta for tensor in tensors)
