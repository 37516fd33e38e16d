"""Checkpointer: what a training script holds to save all of its state, and to go on from it on any number of ranks.

Checkpoints are folders ``step-N``; one counts once its ``.metadata`` is there, which RingWriter's last rename brings
about. The calling thread collects and compares states, and copies them for a save in the background; a thread
(``background``) writes that. Each call is an operation of all ranks (``ranks``), over a process group of the
Checkpointer's own: what is raised in it on one rank is raised on all, and nobody waits for a rank that has left.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, SupportsIndex

import torch.distributed as dist
from torch import Tensor, nn

from dcpring.base import groups, random_states
from dcpring.base.arguments import checks_names, shown, strings, unknown
from dcpring.base.joint import is_damage
from dcpring.base.ranks import Operation, Ranks
from dcpring.base.text import spans
from dcpring.errors import CheckpointError, CorruptCheckpointError
from dcpring.format.manifest import MANIFEST_KEY, Manifest
from dcpring.format.metadata import METADATA_NAME
from dcpring.hf import exports
from dcpring.hf.writer import RingHFWriter
from dcpring.move.staging import Copying, Devices, SideStreams, StagingBuffer
from dcpring.plan.load_planner import RingLoadPlanner
from dcpring.plan.save_planner import RingSavePlanner
from dcpring.resume import trees
from dcpring.resume.background import BackgroundSaves, SaveHandle, wait_for_copy
from dcpring.resume.components import Component, Member, SaveCheck, some_are
from dcpring.resume.disks import CURE, Disks
from dcpring.resume.manifest import Stored
from dcpring.resume.recognise import as_component, model_of, with_joined_parts
from dcpring.resume.reports import ResumeReport, report_of
from dcpring.resume.restore import Restore
from dcpring.resume.retention import Steps, is_read_only, unusable
from dcpring.resume.sharded import ModelState
from dcpring.store.once_reader import OnceReader
from dcpring.store.reader import RingReader
from dcpring.store.writer import RingWriter, Unchanged, check_unchanged
from dcpring.torchside import dcp
from dcpring.watch.events import Staging

__all__ = ["Checkpointer"]

logger = logging.getLogger("dcpring")

_SAVE_OPTIONS, _LOAD_OPTIONS = ("writers", "check_replicas", "split_bytes"), ("share",)
"""What users may give to the planners. What is saved, and under which names, a Checkpointer decides itself."""


class Checkpointer:
    """Saves and loads a training state by components, each of which knows how it comes back on other ranks.

        checkpointer = Checkpointer("ckpt", {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler,
                                             "dataloader": ElasticLoader(loader), "rng": RNG(),
                                             "train_state": Replicated(train_state)}, keep_last=3)
        report = checkpointer.load(missing_ok=True)
        ...
        checkpointer.save(step, blocking=False)

    Making one, ``save``, ``load``, ``wait`` and ``close`` are collective: all ranks call them, in the same order.

    Args:
        folder: where the ``step-N`` folders go, the same on all ranks; made by the first save if missing.
        components: by name. Models, optimizers, LR schedulers, generators and ``ElasticLoader`` are recognised; all
            else says what it is: ``Sharded``, ``Replicated``, ``PerRank``, ``Elastic``, ``RNG``.
        keep_last: checkpoints to keep, the newest; None keeps all. Older ones go once a newer one is committed. Those
            that training has left by going back are not counted, and stay.
        keep_every: keep every step that is a multiple of this too.
        unchanged: "link": tensors that the step before has, bit for bit, are not written again, but its files are
            linked: what is frozen is written once. "trust": the same, without reading parameters that require no
            gradient to compare them, or to copy them for a save in the background, unless they are seen to have
            changed. "write", the default, writes everything. See docs/resume.md.
        busy: what a save in the background does while an earlier one is being written: "wait" for it, or "skip" itself.
        process_group: whose ranks take part; default: all.
        timeout: how long ranks wait for each other in a call, seconds or a timedelta, before that is an error: longer
            than one may write while the others have nothing left to do. None: as long as in the process group.
        writer_options: for ``RingWriter``.
        reader_options: for ``RingReader``.
        planner_options: for the planners: ``writers``, ``check_replicas`` and ``split_bytes`` of ``RingSavePlanner``,
            ``share`` of ``RingLoadPlanner``.
        export_options: for the ``RingHFWriter`` of exports, such as ``dtype=torch.bfloat16``.

    Raises:
        TypeError: it cannot be told how a component reshards; there is no such option.
        ValueError: an argument is out of range.
        CheckpointError: the folder is not there and cannot be made.
    """

    @checks_names()
    def __init__(
        self,
        folder: str | os.PathLike[str],
        components: Mapping[str, Any],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        unchanged: Unchanged = "write",
        busy: Literal["wait", "skip"] = "wait",
        process_group: dist.ProcessGroup | None = None,
        timeout: float | timedelta | None = None,
        writer_options: Mapping[str, Any] | None = None,
        reader_options: Mapping[str, Any] | None = None,
        planner_options: Mapping[str, Any] | None = None,
        export_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._ranks = Ranks(process_group)
        self._member = Member(self._ranks.rank, self._ranks.world_size)
        try:
            with self._ranks.operation("Checkpointer") as joint:
                self.keep_last = None if keep_last is None else _number("keep_last", keep_last, 1)
                self.keep_every = None if keep_every is None else _number("keep_every", keep_every, 1)
                _check_words(unchanged, busy)
                if timeout is not None:
                    self._ranks.set_timeout(_checked_timeout(timeout))
                problem = unusable(folder)
                if problem:
                    raise CheckpointError(problem)
                self.folder = Path(folder).absolute()
                if self._member.rank == 0 and is_read_only(self.folder):
                    logger.warning("nothing can be written into %s: a save there will fail", self.folder)
                self._steps = Steps(self.folder)
                self._disks = Disks(self._steps, self._member.rank, joint.gather("hosts", groups.host_id()))
                self._base: int | None = None  # the step that training comes from, where a load has told
                self._last: int | None = None  # the step that was saved or loaded last
                self.components = _recognised(components)
                self.busy = busy
                self.unchanged: Unchanged = unchanged
                self._frozen: set[tuple[str, str]] = set()  # components and keys
                self._save_options, self._load_options = _for_planners(planner_options or {})
                self._writer_options = _tried("writer_options", writer_options)
                self._reader_options = _tried("reader_options", reader_options)
                self._export_options = _tried("export_options", export_options)
                self._background: BackgroundSaves | None = None
                self._staging = StagingBuffer()
                self._copied: Future[None] | None = None
                self._pid = os.getpid()
                self._is_open = True
        except BaseException:
            self._ranks.close()
            raise

    def __repr__(self) -> str:
        kept = {"keep_last": self.keep_last, "keep_every": self.keep_every}
        return shown(self, str(self.folder), list(self.components), **kept, unchanged=self.unchanged, busy=self.busy)

    # ---- what is there ----

    def path(self, step: int) -> Path:
        """The folder of a step, whether or not there is a checkpoint in it."""
        return self._steps.path(step)

    def steps(self, *, left: bool | None = None) -> list[int]:
        """The steps that have been committed, ascending, as this rank sees them. Not collective.

        Args:
            left: True for those that training has left: it went back to an older step, and saved. False for the
                others. None for all.
        """
        there = self._steps.committed()
        if left is None:
            return there
        gone = self._steps.left()
        return [step for step in there if (step in gone) == left]

    def latest(self) -> int | None:
        """The last committed step that was not left, None if there is none. Not collective."""
        return self._steps.latest()

    # ---- save ----

    def save(
        self,
        step: int,
        blocking: bool = True,
        *,
        export: exports.Format | None = None,
        async_staging: bool = False,
    ) -> SaveHandle:
        """Saves all components as ``step-N``.

        Args:
            step: of the training, from 0. A checkpoint of that step that is there is replaced.
            blocking: return when it is committed and durable. If not, return when the state has been copied; what goes
                wrong then is raised by the handle's ``wait``, or by the next call of any method that is collective.
            export: "hf" writes the model into ``step-N/hf`` as well, once the checkpoint is committed: the directory
                of safetensors that ``from_pretrained`` loads. Of several models each has a folder in it.
            async_staging: with ``blocking=False``, return when copying has begun. Tensors of the state must not change
                until ``synchronize`` or the handle's ``wait_staged`` returns; all else of it may. Of an accelerator is
                copied what this thread has given to its current stream.

        Returns:
            A handle: false if the save was skipped, as an earlier one is not over yet and ``busy="skip"``;
            ``staged()``, ``done()`` and ``wait()`` are for a save in the background.

        Raises:
            CheckpointError: on all ranks, naming those at fault; what was committed before is as it was.
        """
        with contextlib.ExitStack() as after, self._ranks.operation("save") as joint:
            self._require_open()
            step = _number("step", step, 0)
            exports.checked(export, self._models(), self.components)
            if not self._settle(joint, may_skip=not blocking):
                return SaveHandle(False)
            state = self._collect(joint, step, blocking, export)
            if not blocking:
                written, copied = self._start(joint, after, state, step, export, async_staging)
                return SaveHandle(True, written, self._wait_for, copied)
            self._write(joint, state, step, export)
        self._remove_old(step)
        return SaveHandle(True)

    def _wait_for(self, written: Future[None]) -> None:
        """Waits for one save in the background. That it is the pending one, or not any more, all ranks find alike."""
        if self._background is not None and self._background.awaits(written):
            self.wait()
        else:
            written.result()

    def wait(self) -> None:
        """Returns when no save is under way. Raises what went wrong with the last one in the background."""
        with self._ranks.operation("wait") as joint:
            self._require_open()
            self._settle(joint, may_skip=False)

    def _settle(self, joint: Operation, may_skip: bool) -> bool:
        """Waits for the save in the background, or says no if it is to be skipped for."""
        background = self._background
        if background is None or not background.is_pending:
            return True
        if may_skip and self.busy == "skip" and not all(joint.gather("is the last one written?", background.is_done)):
            return False
        background.settle()
        return True

    def _collect(self, joint: Operation, step: int, blocking: bool, export: exports.Format | None) -> dict[str, Any]:
        """What this rank hands to DCP, once all ranks agree that their states make one checkpoint."""
        states: dict[str, Any] = {}
        notes: dict[str, Any] = {}
        failed: tuple[str, Exception] | None = None
        with random_states.kept():  # a loader that is asked for its state may draw a number
            for name, component in self.components.items():
                try:
                    states[name], notes[name] = component.collect(self._member)
                    if component.is_whole:
                        self._check_plain(states[name])
                except Exception as error:  # the others go on, too, as components may have collectives of their own
                    failed = failed or (name, error)
        if failed:
            with joint.doing(f"cannot save step {step}: component {failed[0]!r}"):
                raise failed[1]
        gathered = joint.gather("notes", (notes, (step, blocking, export, list(self.components))))
        _refuse_other_calls([call for _, call in gathered])
        by_name = {name: [noted[name] for noted, _ in gathered] for name in self.components}
        checks = self._check(joint, step, states, by_name)
        state = {name: check.to_save for name, check in checks.items() if check.to_save is not None}
        with joint.doing(f"cannot save step {step}"):
            if self.unchanged != "write":
                models = {name: one for name, one in self.components.items() if isinstance(one, ModelState)}
                self._frozen = {(name, key) for name, model in models.items() for key in model.frozen(states[name])}
            if self._member.rank == 0:
                state[MANIFEST_KEY] = self._manifest(step, checks).dump()
        return state

    def _check(
        self, joint: Operation, step: int, states: dict[str, Any], notes: dict[str, list[Any]]
    ) -> dict[str, SaveCheck]:
        """What the components find in the notes of all ranks. Raises on all ranks where one finds a problem."""
        checks = {name: self._check_one(joint, step, name, states, notes) for name in self.components}
        details = {name: check.detail for name, check in checks.items() if check.detail is not None}
        if details:  # on all ranks
            seen = joint.gather("details", details)
            for name in details:
                notes[name] = [{**note, **each[name]} for note, each in zip(notes[name], seen, strict=True)]
                checks[name] = self._check_one(joint, step, name, states, notes)
        for name, check in checks.items():
            if check.problems:
                own = trees.digests(states[name]) if self.components[name].is_whole else {}
                items = [set(digests.items()) for digests in joint.gather("digests", own)]
                differing = {place for each in items for place, _ in each ^ items[0] if place}
                where = f" ({some_are(map(trees.text_of, differing))} not the same)" if differing else ""
                raise CheckpointError(
                    f"cannot save step {step}: component {name!r}: {'; '.join(check.problems)}{where}"
                )
        return checks

    def _check_one(
        self, joint: Operation, step: int, name: str, states: dict[str, Any], notes: dict[str, list[Any]]
    ) -> SaveCheck:
        with joint.doing(f"cannot save step {step}: component {name!r}"):
            return self.components[name].check(states[name], notes[name], self._member)

    def _check_plain(self, state: Any) -> None:
        trees.refuse_sharded(state)
        if not self._reader_options.get("trusted", False):
            trees.refuse_unloadable(state, list(self._reader_options.get("safe_globals", ())))

    def _manifest(self, step: int, checks: dict[str, SaveCheck]) -> Manifest:
        entries = {
            name: {"kind": component.kind, "type": component.type_name, **checks[name].entry}
            for name, component in self.components.items()
        }
        return Manifest(step, self._member.world_size, entries)

    def _known_to_load(self) -> dict[str, Any]:
        """For the writer: what loads here will not refuse."""
        known: dict[str, Any] = {"safe_globals": self._reader_options.get("safe_globals", ())}
        if self._reader_options.get("trusted", False):
            known["objects"] = "allow"
        return known

    def _about_unchanged(self) -> dict[str, Any]:
        """For the writer: the step before, as this rank sees it. Each rank compares its own part, and links that."""
        if self.unchanged == "write":
            return {}
        there = self._steps.committed()
        before = self._last if self._last in there else max(there, default=None)
        return {"unchanged": self.unchanged} | ({} if before is None else {"unchanged_from": self.path(before)})

    def _write(
        self,
        joint: Operation,
        state: dict[str, Any],
        step: int,
        export: exports.Format | None,
        staging: Staging | None = None,
    ) -> None:
        what = f"cannot save {self.path(step)}"
        with joint.doing(what):
            if self._member.rank == 0:
                self._steps.before(step, self._base, self._syncs)
            options = self._known_to_load() | self._about_unchanged() | self._writer_options
            writer = RingWriter(self.path(step), **options)
            writer.note_frozen({f"{name}.{key}" for name, key in self._frozen})
            planner = RingSavePlanner(**self._save_options)
            if staging is not None:
                writer.note_staged(staging)
        joint.run_dcp("writing", what, lambda group: dcp.save(state, writer, planner, group))
        self._disks.after_commit(joint, step, self.keep_last, self.keep_every)
        if self._base is not None:
            self._base = step
        self._last = step
        self._export(joint, state, step, export)

    def _export(self, joint: Operation, state: dict[str, Any], step: int, export: exports.Format | None) -> None:
        """Exports what was committed. What another checkpoint of this step has left there goes."""
        folder = self.path(step)
        if export is None:
            if self._member.rank == 0:
                exports.remove(folder)
            return
        what = f"{folder} is saved, but cannot be exported"
        with joint.doing(what):
            found = exports.exports_of(self._models(), state, folder, self._export_options)
        for one in found:
            self._write_export(joint, one, what)

    def _models(self) -> dict[str, nn.Module]:
        """The components that are models."""
        return {name: one.whole for name, one in self.components.items() if isinstance(one, ModelState)}

    def _write_export(self, joint: Operation, one: exports.Export, what: str) -> None:
        planner = RingSavePlanner(**self._save_options)
        joint.run_dcp("exporting", what, lambda group: dcp.save(one.tensors, one.writer, planner, group))
        with joint.doing(what):
            if self._member.rank == 0:
                one.finish()

    def synchronize(self) -> None:
        """Returns when the state may change, after a save with ``async_staging``: call it before the optimizer's step.

        It is not collective, and raises nothing of the save.
        """
        if self._copied is not None:
            wait_for_copy(self._copied)
            self._copied = None

    def _start(
        self,
        joint: Operation,
        after: contextlib.ExitStack,
        state: dict[str, Any],
        step: int,
        export: exports.Format | None,
        async_staging: bool,
    ) -> tuple[Future[None], Future[None]]:
        """Copies the state, or begins to, and has it written: what is done when it is written, and when copied.

        Where the operation fails on any rank, ``after`` it all of them end the save in the background and leave its
        group. So does a rank that has started nothing yet: another may have, and have said something in the group that
        would be taken for a word of the next save.
        """

        def leave(_: object, error: BaseException | None, __: object) -> None:
            if error is not None and not joint.is_over and self._background is not None:
                self._background.abandon(error)

        after.push(leave)
        what = f"cannot save step {step}: copying the state"
        with joint.doing(what):
            devices = SideStreams() if async_staging else Devices()
            copying = Copying(self._staging, self._staging.open(state, devices, self._frozen_in(state)))
            copies = [] if async_staging else [_filled(copying)]
        joint.settle("copied")
        if self._background is None:
            self._background = BackgroundSaves(self._ranks)

        def work(own: Operation) -> None:
            with own.doing(what):
                staged, timed = copies.pop() if copies else _filled(copying)
            self._write(own, staged, step, export, timed)

        written = self._background.start(work, after=lambda: self._remove_old(step))
        written.add_done_callback(lambda _: copying.give_up())
        self._copied = copying.copied
        return written, copying.copied

    def _frozen_in(self, state: dict[str, Any]) -> list[Tensor] | None:
        """What need not be copied again; None: all is to be copied."""
        if self.unchanged != "trust":
            return None
        return [state[name][key] for name, key in self._frozen]

    # ---- retention ----

    def _remove_old(self, saved: int) -> None:
        """Removes what a checkpoint that was just committed makes superfluous; a failure is none of the save."""
        try:
            if self._member.rank != 0:
                self._disks.remove_old(self._syncs)
                return
            self._steps.after(self._syncs)
            self._steps.remove_superfluous(saved, self.keep_last, self.keep_every, self._syncs)
        except Exception as error:
            logger.warning("older checkpoints stay in %s: %s", self.folder, error)

    @property
    def _syncs(self) -> bool:
        return bool(self._writer_options.get("sync_files", True))

    # ---- load ----

    def load(
        self,
        step: int | None = None,
        components: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] = (),
        *,
        missing_ok: bool = False,
        fallback: bool = False,
    ) -> ResumeReport:
        """Loads a checkpoint. All ranks first compare what they need with what is there, and go on only if all can.

        Args:
            step: which; None: the last committed one that was not left. What is later than the step that is loaded is
                left with the next save, unless ``components`` are chosen.
            components: only these; None: all, which must then be those of the checkpoint.
            exclude: but not these.
            missing_ok: without a checkpoint in the folder, change nothing and return a report whose ``step`` is None.
            fallback: where data or metadata of the step turn out to be damaged or missing, on any rank, load the newest
                step before it that is whole, on all. What the damaged one has changed is loaded anew. The report's
                ``passed_over`` says which steps were damaged, and a warning. Anything else that is wrong is an error.

        Raises:
            CheckpointError: on all ranks, with one report of what does not fit. Nothing was changed then, unless
                data turned out to be damaged while a model's or optimizer's tensors were read; the message says so.
        """
        with self._ranks.operation("load") as joint:
            self._require_open()
            self._settle(joint, may_skip=False)
            wanted = None if components is None else set(strings(components, "components"))
            left_out = set(strings(exclude, "exclude"))
            found = self._choose_step(joint, step, fallback)
            if found is None:
                return self._without(joint, missing_ok)
            report = (self._load_whole if fallback else self._load)(joint, found, wanted, left_out)
            if wanted is None:
                self._base = report.step
            self._last = report.step
            return report

    def _without(self, joint: Operation, missing_ok: bool) -> ResumeReport:
        """There is no checkpoint that counts."""
        with joint.doing(f"cannot look into {self.folder}"):
            there = joint.gather("steps", self.steps())[0]
        if there:
            raise CheckpointError(
                f"all checkpoints in {self.folder} were left by a training whose own are gone: steps {there}; load "
                "one by its number, or remove them"
            )
        if not missing_ok:
            raise CheckpointError(f"there is no checkpoint in {self.folder}")
        return ResumeReport(None, world_size=self._member.world_size)

    def _load(self, joint: Operation, step: int, wanted: set[str] | None, left_out: set[str]) -> ResumeReport:
        path = self.path(step)
        with joint.doing(f"cannot load {path}"):
            reader = OnceReader(path, **self._reader_options)
            reader.joint = joint
            stored = Stored(reader)
            stored.manifest  # noqa: B018 - read here, where all ranks are told of what is wrong with it
        plans = Restore(joint, self.components, stored, self._member, self._load_options).run(wanted, left_out)
        stored.reader.tell(self._member.rank)
        return report_of(step, stored, plans, self.components, self._member)

    def _load_whole(self, joint: Operation, step: int, wanted: set[str] | None, left_out: set[str]) -> ResumeReport:
        """The same of the newest step from this one back that is not damaged, as rank 0 sees the steps."""
        passed: dict[int, str] = {}
        with joint.doing(f"cannot look into {self.folder}"):
            steps = joint.gather("steps", [step, *(one for one in reversed(self.steps(left=False)) if one < step)])[0]
        for one in steps:
            try:
                report = self._load(joint, one, wanted, left_out)
                joint.settle("loaded")
                return replace(report, passed_over=passed)
            except Exception as error:
                told = joint.tell(error)
                if not is_damage(told):
                    if passed:
                        raise CheckpointError(f"{told} ({_passed_text(passed)})") from error
                    raise told from (None if told is error else error)
                passed[one] = str(told)
                if self._member.rank == 0:
                    logger.warning("step %d is damaged, and passed over: %s", one, told)
        raise CorruptCheckpointError(f"no step in {self.folder} can be loaded; {_passed_text(passed)}")

    def _choose_step(self, joint: Operation, step: int | None, fallback: bool) -> int | None:
        """The step that rank 0 sees, for all."""
        with joint.doing(f"cannot look into {self.folder}"):
            step = None if step is None else _number("step", step, 0)
            last = self.latest() if step is None else step
        found = joint.gather(f"step, with fallback={fallback}", (step, last))
        if len({asked for asked, _ in found}) > 1:
            raise CheckpointError(f"ranks asked for different steps: {sorted({str(asked) for asked, _ in found})}")
        chosen = found[0][1]
        with joint.doing(f"cannot look into {self.folder}"):
            if step is None:
                is_seen = last is not None if chosen is None else self._steps.appears(chosen)
            else:
                is_seen = self._steps.metadata(step).is_file()
        seen = joint.gather("is it there?", is_seen)
        if len(set(seen)) > 1:
            with_it, without = ([rank for rank, sees in enumerate(seen) if sees is it] for it in (True, False))
            raise CheckpointError(
                f"{self.path(chosen or found[with_it[0]][1] or 0)} is a checkpoint for {spans(with_it)}, but not for "
                f"{spans(without)}, as it has no {METADATA_NAME} there: ranks see different directories. Where the "
                f"files of a checkpoint lie on several hosts, {CURE}"
            )
        if chosen is not None and not is_seen:
            raise CheckpointError(f"there is no checkpoint in {self.path(chosen)}; there are steps {self.steps()}")
        return chosen

    # ---- the end ----

    def close(self) -> None:
        """Waits for the save in the background, and gives back the thread, the buffer and the process groups."""
        if not self._is_open or os.getpid() != self._pid:
            return
        self._is_open = False
        try:
            if self._background is not None:
                self._background.settle()
        finally:
            if self._background is not None:
                self._background.close()
            self._staging.release()
            self._ranks.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError:
            if error is None:
                raise  # else it has been logged, and what ends the body is not to be hidden

    def __reduce__(self) -> Any:
        raise TypeError(
            f"the Checkpointer of {self.folder} can neither be pickled nor copied: it has a process group, a thread "
            "and memory of this process. Make one in each process, and keep it out of what is sent or copied"
        )

    def _require_open(self) -> None:
        if not self._is_open:
            raise ValueError("this Checkpointer has been closed")
        if os.getpid() != self._pid:
            raise ValueError(f"this Checkpointer belongs to process {self._pid}; make another in a forked process")


def _passed_text(passed: Mapping[int, str]) -> str:
    return "; ".join(f"step {step} is damaged: {why}" for step, why in passed.items())


def _checked_timeout(timeout: float | timedelta) -> timedelta:
    given = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if given <= timedelta(0):
        raise ValueError(f"timeout={timeout!r}: must be more than 0 seconds, or None")
    return given


def _number(name: str, value: SupportsIndex, least: int) -> int:
    """An option that is a number, of whatever class of integers (NumPy's)."""
    number = operator.index(value) if isinstance(value, SupportsIndex) and not isinstance(value, bool) else least - 1
    if number < least:
        raise ValueError(f"{name}={value!r}: must be an int of at least {least}")
    return number


def _check_words(unchanged: Unchanged, busy: str) -> None:
    if busy not in ("wait", "skip"):
        raise ValueError(f'busy={busy!r}: must be "wait" or "skip"')
    check_unchanged(unchanged)


_TAKERS: dict[str, Callable[..., Any]] = {
    "writer_options": RingWriter,
    "reader_options": RingReader,
    "export_options": RingHFWriter,
}


def _tried(name: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Options for a class, which takes them once: so a wrong one is found now, and not days later."""
    try:
        _TAKERS[name](os.curdir, **(options or {}))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error
    return dict(options or {})


def try_options(options: Mapping[str, Any], called: str) -> None:
    """Refuses what a ``Checkpointer`` would refuse. Plugs of trainers are made long before they can make one.

    Args:
        options: arguments of ``Checkpointer``, but for ``folder`` and ``components``.
        called: what the user has called with them: "RingCheckpoint()".

    Raises:
        TypeError, ValueError: with the words of ``Checkpointer``.
    """
    known = set(inspect.signature(Checkpointer).parameters) - {"folder", "components"}
    if not options.keys() <= known:
        raise TypeError(unknown(options, known, called))
    for name in ("keep_last", "keep_every"):
        if options.get(name) is not None:
            _number(name, options[name], 1)
    _check_words(options.get("unchanged", "write"), options.get("busy", "wait"))
    if options.get("timeout") is not None:
        _checked_timeout(options["timeout"])
    _for_planners(options.get("planner_options") or {})
    for name in _TAKERS:
        _tried(name, options.get(name))


def _for_planners(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the save's planner, and those of the load's; all have been tried."""
    save, load = (
        {name: options[name] for name in names if name in options} for names in (_SAVE_OPTIONS, _LOAD_OPTIONS)
    )
    known = (*_SAVE_OPTIONS, *_LOAD_OPTIONS)
    if wrong := unknown(options, known, "a planner of a Checkpointer's"):
        raise TypeError(f"planner_options: {wrong}; it takes {', '.join(known)}")
    RingSavePlanner(**save)
    RingLoadPlanner(**load)
    return save, load


def _recognised(components: Mapping[str, Any]) -> dict[str, Component]:
    if not components:
        raise ValueError("components: there is nothing to save")
    for name in components:
        if not isinstance(name, str) or not name or "." in name or name == MANIFEST_KEY:
            raise ValueError(f"component {name!r}: a name is a string without dots, and not {MANIFEST_KEY!r}")
    given = {name: with_joined_parts(value) for name, value in components.items()}
    models = [model for model in map(model_of, given.values()) if model is not None]
    return {name: as_component(name, value, models) for name, value in given.items()}


def _refuse_other_calls(calls: Sequence[tuple[int, bool, exports.Format | None, list[str]]]) -> None:
    """All ranks save the same step of the same components, in the same order."""
    others = [rank for rank, call in enumerate(calls) if call != calls[0]]
    if others:
        first, other = (
            f"step {step} of {', '.join(names)}{'' if blocking else ', in the background'}"
            f"{f', exported as {export}' if export else ''}"
            for step, blocking, export, names in (calls[0], calls[others[0]])
        )
        raise CheckpointError(f"rank 0 saves {first}, but {spans(others)}: {other}; call save() alike on all ranks")


def _filled(copying: Copying) -> tuple[Any, Staging]:
    """The copy, and when it was made."""
    with Staging.timed() as staging:
        tree = copying.fill()
    copying.copied.result()  # raises what went wrong
    return tree, staging
