"""Writes one rank's part of the files that all ranks write together, as ``hf.file_plan`` has planned it.

A rank writes its own stripes from its memory. Others are put together in rounds: every rank fills what it holds into
memory that the ranks of its host share, and they wait for each other at a barrier there. What other hosts hold comes
through the process group, by which all tell how they do; so they do on one host, too, where a rank keeps others waiting
at the barrier. Then the stripe's writer copies it into a block, which is on its way while all fill the next round, in
other memory.

Tensors that are no plain memory of the file's dtype, as they are to be cast or lie on an accelerator, are copied, of
each no more than the rows that a window needs.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from dcpring import _C
from dcpring.base import groups
from dcpring.base.casts import check_values
from dcpring.base.joint import GroupChannel, Joint, joined
from dcpring.base.memory import handles_and_kinds
from dcpring.base.windows import read_ahead, windows
from dcpring.errors import CheckpointError
from dcpring.hf.file_plan import ROUND_BYTES, ROUNDS_IN_MEMORY, Assignment, FileLayout, FileStripes, Laid, SharedStripe
from dcpring.move import host_memory
from dcpring.move.pending import Pending
from dcpring.move.save.items import items_of
from dcpring.options import IOOptions, IOStats
from dcpring.plan.run import Save
from dcpring.plan.save_planner import makes_tensors
from dcpring.torchside.groups import device_of

MEET_SECONDS = 60.0
"""How long ranks wait for all to have come to write together."""

_WINDOW_BYTES = 16 << 20
"""Of copies that are made, of tensors that have to be."""

Stripe = tuple[int, int, int]
"""A range [lo, hi) of a file, and its offset in shared memory; -1 where it is in this rank's own."""

Sums = list[tuple[int, int, bytes]]
"""Of each block the file's number, its offset in the file, and the CRCs of the tensors in it."""


class _HeldBox(NamedTuple):
    """A box of a tensor that this rank holds.

    Attributes:
        position: among the items of the plan.
        offsets, lengths: of the box in the tensor.
        laid: where the tensor lies.
    """

    position: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    laid: Laid


Patches = tuple[list[tuple[int, tuple[int, ...], tuple[int, ...]]], _C.Tensors]
"""What the core is given of a window: boxes in the order of the file, and the memory they are in."""


def _meeting(part: Assignment, group: dist.ProcessGroup) -> groups.Meeting:
    return groups.Meeting(f"dcpring/stripes/{part.common.token}", dist.get_world_size(group))


def stay_away(part: Assignment, group: dist.ProcessGroup | None) -> None:
    """This rank cannot write: the others need not wait for it."""
    if part.has_rounds and group is not None:
        meeting = _meeting(part, group)
        meeting.settle(False)
        meeting.leave()


class StripeSaving:
    """Writes the stripes of one rank. One is made for every ``write_data``.

    Args:
        plan, planner: of this rank.
        part: what the coordinator has given this rank.
        path: directory of the files.
        save: which this belongs to.
        options: of the writer; blocks are of the coordinator's size.
        pending: the files whose syncs have begun; they are the caller's to wait for.
        stats: counts what is written.
        group: of all ranks of the save; None where there is one alone.
    """

    def __init__(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        part: Assignment,
        path: str,
        save: Save,
        options: IOOptions,
        pending: Pending,
        stats: IOStats,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._items = items = items_of(plan.items, planner)
        self._part, self._common = part, part.common
        self._path, self._save, self._stats = path, save, stats
        self._pending, self._watch = pending, pending.watch
        self._options = replace(options, block_size_bytes=part.common.block_bytes)
        self._makes_tensors = makes_tensors(planner)  # when it is asked for them: never for many at a time
        self._group = group
        self._sums: Sums = []
        places = {laid.name: (number, laid) for number, file in enumerate(self._common.files) for laid in file.tensors}
        self._held: list[list[_HeldBox]] = [[] for _ in self._common.files]
        for position in items.tensors:
            name, (offsets, lengths) = items.names[position], items.box(position)
            if math.prod(lengths) and name not in self._common.omitted:
                number, laid = places[name]
                self._held[number].append(_HeldBox(position, offsets, lengths, laid))
        for held in self._held:
            held.sort(key=lambda one: one.laid.begin)
        save.meter.begin(lambda: sum(each.writes_bytes for each in part.parts))

    def write(self) -> Sums:
        """Writes this rank's stripes of all files, and gives their CRCs."""
        files = list(zip(self._common.files, self._part.parts, self._held, strict=True))
        if not self._part.has_rounds:
            for number, (layout, part, held) in enumerate(files):
                with self._writing(layout, part) as file:
                    self._write_own(self._turn(number, layout, file, held), part)
            return self._sums
        assert self._group is not None
        meeting = _meeting(self._part, self._group)
        with self._save.events.span("wait for all", "wait"):
            all_came = meeting.wait(MEET_SECONDS)
        meeting.leave()
        if not all_came:
            raise CheckpointError(f"not all ranks have come to write {self._path} together within {MEET_SECONDS:.0f} s")
        with contextlib.ExitStack() as stack:
            joint = stack.enter_context(joined(Joint(GroupChannel(self._group), "save")))
            rounds = _StripeRounds(self, joint, self._part, self._options.workers, self._group)
            stack.callback(rounds.leave)
            for number, (layout, part, held) in enumerate(files):
                with joint.doing(f"{layout.name} cannot be written"), self._writing(layout, part) as file:
                    turn = self._turn(number, layout, file, held)
                    self._write_own(turn, part)
                    rounds.run(turn)
        return self._sums

    @contextlib.contextmanager
    def _writing(self, layout: FileLayout, part: FileStripes) -> Iterator[_C.StripeFile | None]:
        """The file, which is being made durable at the end; None where this rank writes none of it."""
        if not part.writes_bytes:
            yield None
            return
        options = self._options.for_core(self._pending.syncs is not None, self._watch)
        file = _C.StripeFile(self._path, layout.name, 0, part.writes_bytes, options)
        try:
            yield file
            with self._save.events.core(self._watch, f"end of {layout.name}", [layout.name]):
                file.finish(None, self._pending.syncs)
            self._pending.synced.append(layout.name)
            engine, direct = file.stats()
        finally:
            file.close()
        self._stats.engine = engine or self._stats.engine
        self._stats.direct |= direct
        self._stats.bytes += part.writes_bytes
        self._stats.files += 1

    # ---- writing ----

    def _write_own(self, turn: _FileTurn, part: FileStripes) -> None:
        blocks = [(lo, hi, -1) for range_ in part.own for lo, hi in _blocks(*range_, self._common.block_bytes)]
        batches = windows(blocks, lambda block: block[1] - block[0], turn.window_bytes)
        with contextlib.closing(
            read_ahead("dcpring-gather", batches, lambda batch: self.patches(turn, batch))
        ) as ready:
            for batch, (patches,) in ready:
                self.write_blocks(turn, batch, patches, None)

    def write_blocks(self, turn: _FileTurn, blocks: list[Stripe], patches: Patches, memory: memoryview | None) -> None:
        if not blocks:
            return
        assert turn.file is not None
        with self._save.events.core(self._watch, f"file {turn.layout.name}", [turn.layout.name]):
            crcs = turn.file.write(blocks, *patches, memory, turn.payloads)
        self._sums += [(turn.number, lo, each) for (lo, _, _), each in zip(blocks, crcs, strict=True)]
        self._stats.tensor_bytes += sum(hi - lo for lo, hi, _ in blocks)

    # ---- what this rank holds ----

    def _turn(self, number: int, layout: FileLayout, file: _C.StripeFile | None, held: list[_HeldBox]) -> _FileTurn:
        """Whatever can be taken from where it lies needs no windows."""
        payloads = [(laid.begin, laid.size_bytes) for laid in layout.tensors]
        return _FileTurn(number, layout, file, held, None if self._is_plain(held) else _WINDOW_BYTES, payloads)

    def _is_plain(self, held: list[_HeldBox]) -> bool:
        if self._makes_tensors:
            return False
        tensors = self._resolve(held)
        dtypes = [tensor.dtype for tensor in tensors]
        return dtypes == [one.laid.dtype for one in held] and not any(handles_and_kinds(tensors)[1])

    def _resolve(self, held: Sequence[_HeldBox]) -> list[Tensor]:
        tensors = self._items.resolve([one.position for one in held])
        for one, tensor in zip(held, tensors, strict=True):
            wrong = _wrong(one.lengths, tensor)
            if wrong:
                raise CheckpointError(f"cannot save {one.laid.name!r} in safetensors: it is {wrong}")
        return tensors

    def patches(self, turn: _FileTurn, stripes: Sequence[tuple[int, int, Any]]) -> Patches:
        """What this rank holds of some stripes of a file, in memory as the core takes it."""
        if not stripes or not turn.held:
            return ([], _C.Tensors([]))
        lo, hi = stripes[0][0], stripes[-1][1]
        first = bisect.bisect_right(turn.held, lo, key=lambda one: one.laid.end)
        held = turn.held[first : bisect.bisect_left(turn.held, hi, key=lambda one: one.laid.begin)]
        tensors = self._resolve(held)
        handles, kinds = handles_and_kinds(tensors)
        resolved = list(tensors)
        boxes, copied = [], False
        for index, (one, kind) in enumerate(zip(held, kinds, strict=True)):
            offsets = one.offsets
            if kind or resolved[index].dtype != one.laid.dtype:
                offsets, resolved[index] = _copied(one, tensors[index], lo, hi)
                copied = True
            boxes.append((one.laid.begin, one.laid.shape, offsets))
        return boxes, _C.Tensors(resolved) if copied else handles


def _wrong(lengths: Sequence[int], tensor: Any) -> str:
    """Why a tensor cannot be saved as a box of this shape; "" if it can."""
    if not isinstance(tensor, Tensor):
        return f"a {type(tensor).__name__}"
    if tensor.is_meta:
        return "on the meta device and has no data"
    if tensor.layout != torch.strided:
        return f"of layout {tensor.layout}"
    return "" if tuple(tensor.shape) == lengths else f"of shape {list(tensor.shape)}, not {list(lengths)}"


class _FileTurn(NamedTuple):
    """A file being written.

    Attributes:
        number: of the file.
        file: None where this rank writes none of it.
        held: what this rank holds of it, in its order.
        window_bytes: so much is taken at a time; None: all.
        payloads: the begin and the size of each of its tensors.
    """

    number: int
    layout: FileLayout
    file: _C.StripeFile | None
    held: list[_HeldBox]
    window_bytes: int | None
    payloads: list[tuple[int, int]]


def _copied(one: _HeldBox, tensor: Tensor, lo: int, hi: int) -> tuple[tuple[int, ...], Tensor]:
    """Copies what the bytes [lo, hi) of the file need of a box, to host memory and in the file's dtype.

    Returns the offsets of the copy in the tensor, and the copy.

    It is cut along the first dimension that has more than one element.
    """
    offsets = list(one.offsets)
    axis = next((axis for axis, length in enumerate(one.lengths) if length > 1), None)
    part = tensor.detach()
    if axis is not None:
        size = one.laid.dtype.itemsize
        row = math.prod(one.laid.shape[axis + 1 :]) * size
        outer = sum(
            offset * math.prod(one.laid.shape[place + 1 :]) * size for place, offset in enumerate(offsets[:axis])
        )
        first = max((lo - one.laid.begin - outer) // row - offsets[axis], 0)
        end = min(-(-(hi - one.laid.begin - outer) // row) - offsets[axis], one.lengths[axis])
        first = min(first, one.lengths[axis] - 1)
        part = part.narrow(axis, first, max(end - first, 1))
        offsets[axis] += first
    part = part.resolve_conj().resolve_neg()
    check_values(one.laid.name, part, one.laid.dtype)
    part = part.to(dtype=one.laid.dtype).to("cpu")
    if type(part) is not Tensor:
        part = part.as_subclass(Tensor)
    return tuple(offsets), part


def _blocks(lo: int, hi: int, size: int) -> Iterator[tuple[int, int]]:
    """A range of a file, cut on the grid of blocks."""
    while lo < hi:
        end = min((lo // size + 1) * size, hi)
        yield lo, end
        lo = end


# ---- rounds ----


class _StripeRounds:
    """Puts together the stripes that several ranks hold, in rounds. The module's docstring says how.

    Args:
        saving: what this rank holds, and how it is written.
        joint: with all ranks.
    """

    def __init__(
        self, saving: StripeSaving, joint: Joint, part: Assignment, workers: int, group: dist.ProcessGroup
    ) -> None:
        self._saving, self._group, self._workers = saving, group, workers
        self._rank = dist.get_rank(group)
        self._common = part.common
        self._hosts: list[Any] = list(self._common.hosts)
        leader = self._hosts.index(self._hosts[self._rank])
        rooms = ROUNDS_IN_MEMORY, ROUND_BYTES
        memory, problem = host_memory.share(joint, self._rank, leader, host_memory.Rounds.size_of(*rooms))
        if problem:  # then each rank is a host of its own
            self._hosts = list(range(len(self._hosts)))
            memory = memoryview(bytearray(host_memory.Rounds.size_of(*rooms)))
        self._far = len(set(self._hosts)) > 1
        self._rounds = host_memory.Rounds(joint, len(self._hosts), *rooms, memory, is_one_host=not self._far)
        self._number = 0

    def leave(self) -> None:
        self._rounds.leave()

    def run(self, turn: _FileTurn) -> None:
        for stripes in self._common.rounds[turn.number]:
            self._round(turn, [stripe for stripe in stripes if self._rank in stripe.holders])

    def _round(self, turn: _FileTurn, stripes: list[SharedStripe]) -> None:
        """Fills a round, with all ranks, and takes from it what is this rank's to write.

        The memory was a round's before the last one. Of that all have taken what is theirs: they have come to the last.
        """
        memory = self._rounds.room(self._number)
        places = [(stripe.lo, stripe.hi, stripe.at) for stripe in stripes]
        for batch in windows(places, lambda place: place[1] - place[0], turn.window_bytes):
            _C.fill_stripes(batch, *self._saving.patches(turn, batch), memory, self._workers)
        self._rounds.meet(self._number)
        self._number += 1
        if self._far:
            self._bring(stripes, memory)
        own = [stripe for stripe in stripes if stripe.writer == self._rank]
        nothing: Patches = [], _C.Tensors([])
        self._saving.write_blocks(turn, _joined(own, self._common.block_bytes), nothing, memory)
        if self._far:  # as what other hosts send is added to it
            for stripe in own:
                torch.frombuffer(memory[stripe.at : stripe.at + stripe.hi - stripe.lo], dtype=torch.uint8).zero_()

    def _bring(self, stripes: list[SharedStripe], memory: memoryview) -> None:
        """Brings what other hosts hold of stripes to their writers. Bytes that a host does not hold are zeros there."""
        device = device_of(self._group)
        operations, arrived, sent = [], [], []
        for stripe in stripes:
            room = torch.frombuffer(memory[stripe.at : stripe.at + stripe.hi - stripe.lo], dtype=torch.uint8)
            carriers: dict[Any, int] = {}
            for rank in stripe.holders:
                carriers.setdefault(self._hosts[rank], rank)
            carriers.pop(self._hosts[stripe.writer], None)
            if stripe.writer == self._rank:
                for carrier in carriers.values():
                    data = torch.empty(len(room), dtype=torch.uint8, device=device)
                    operations.append(dist.P2POp(dist.irecv, data, group=self._group, group_peer=carrier))
                    arrived.append((room, data))
            elif self._rank in carriers.values():
                data = room.to(device, copy=True)
                operations.append(dist.P2POp(dist.isend, data, group=self._group, group_peer=stripe.writer))
                sent.append(room)
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        for room, data in arrived:
            room |= data.cpu()
        for room in sent:
            room.zero_()


def _joined(stripes: Iterable[SharedStripe], most: int) -> list[Stripe]:
    """Stripes as the core writes them: those that follow each other are one block."""
    found: list[Stripe] = []
    for stripe in stripes:
        if found:
            lo, hi, at = found[-1]
            if hi == stripe.lo and at + hi - lo == stripe.at and lo // most == (stripe.hi - 1) // most:
                found[-1] = lo, stripe.hi, at
                continue
        found.append((stripe.lo, stripe.hi, stripe.at))
    return found


def crcs_by_tensor(layouts: Sequence[FileLayout], sums: Iterable[Sums]) -> list[dict[str, str]]:
    """Of each file the CRCs of its tensors, in hexadecimal, by the names that they have in it."""
    found: list[dict[str, str]] = []
    by_file: list[list[tuple[int, bytes]]] = [[] for _ in layouts]
    for number, lo, crcs in itertools.chain.from_iterable(sums):
        by_file[number].append((lo, crcs))
    for layout, blocks in zip(layouts, by_file, strict=True):
        data, at = b"".join(crcs for _, crcs in sorted(blocks)), 0
        of_file = {}
        for laid in layout.tensors:
            of_file[laid.stored] = data[at : at + 4 * laid.crc_count].hex()
            at += 4 * laid.crc_count
        if at != len(data):
            raise CheckpointError(f"{layout.name}: ranks report {len(data)} bytes of CRCs, and there should be {at}")
        found.append(of_file)
    return found
