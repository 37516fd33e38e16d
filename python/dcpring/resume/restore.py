"""One load of a Checkpointer: what is there is compared with what is wanted, read, and taken over.

A ``Restore`` is of one operation of all ranks, in its thread. Everything that can be refused is refused before a
component changes: plans are compared first, then objects are read and checked, then tensors are read in place, and at
last components take their states over.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from dcpring.base.joint import Failure, described, failure_of
from dcpring.base.ranks import Operation
from dcpring.base.text import ranks, some_keys, spans
from dcpring.errors import CheckpointError
from dcpring.plan.load_planner import RingLoadPlanner
from dcpring.resume.components import Component, ComponentPlan, Member, Outlook, Remarks, some_are
from dcpring.resume.manifest import Stored
from dcpring.resume.sharded import ModelState
from dcpring.torchside import dcp

logger = logging.getLogger("dcpring")


class Restore:
    """What one load has: the operation, the components that there are, and what is stored."""

    def __init__(
        self,
        joint: Operation,
        components: Mapping[str, Component],
        stored: Stored,
        member: Member,
        options: Mapping[str, Any],
    ) -> None:
        self._joint = joint
        self._components = components
        self._stored = stored
        self._member = member
        self._options = options

    def run(self, wanted: set[str] | None, left_out: set[str]) -> dict[str, ComponentPlan]:
        """Loads these components (None: all) but those; what came of it, by component."""
        doing = f"cannot load {self._stored.path}"
        with self._joint.doing(doing):
            chosen = self._choose_components(wanted, left_out)
        if len(set(map(tuple, self._joint.gather("components", list(chosen))))) > 1:
            raise CheckpointError(f"{doing}: ranks chose different components; call load() alike on all")
        plans = self._plan(chosen)
        self._read(plans, in_place=False)
        ready = self._prepare(plans)
        self._read(plans, in_place=True)
        self._remark(plans, self._take(plans, ready))
        return plans

    def _choose_components(self, asked: set[str] | None, left_out: set[str]) -> dict[str, Component]:
        """The components to load, in the order in which they take their states."""
        wanted = set(self._components) if asked is None else asked
        for name, component in self._components.items():
            if isinstance(component, ModelState) and self._stored.manifest is None:
                self._stored.adopt_flat(name, set(component.collect(self._member)[0]), self._components)
        known = self._components.keys() | self._stored.keys.keys()
        unknown = sorted((wanted | left_out) - known)
        if unknown:
            raise CheckpointError(f"there is no component {some_keys(unknown)}; there are {', '.join(sorted(known))}")
        foreign = sorted(wanted - self._components.keys())
        if foreign:
            raise CheckpointError(
                f"{some_are(foreign)} in the checkpoint, but not among this Checkpointer's components; make the "
                "Checkpointer with what is to be loaded, or do not ask for it"
            )
        unclaimed = self._stored.keys.keys() - self._components.keys() - left_out if asked is None else set()
        chosen = {name: component for name, component in self._components.items() if name in wanted - left_out}
        absent = [name for name in chosen if name not in self._stored.keys]
        if unclaimed or absent:
            raise CheckpointError(self._mismatch(sorted(unclaimed), absent))
        return dict(sorted(chosen.items(), key=lambda item: (item[1].is_whole, item[1].goes_last)))

    def _mismatch(self, unclaimed: list[str], absent: list[str]) -> str:
        lines = [f"{self._stored.origin}, with other components:"]
        lines += [f"  {name}: in the checkpoint, but not in this Checkpointer (removed since?)" for name in unclaimed]
        lines += [f"  {name}: in this Checkpointer, but not in the checkpoint (added since?)" for name in absent]
        return "\n".join([*lines, f"To load the rest: exclude={[*unclaimed, *absent]}"])

    def _plan(self, chosen: dict[str, Component]) -> dict[str, ComponentPlan]:
        plans: dict[str, ComponentPlan] = {}
        for name, component in chosen.items():
            try:
                plans[name] = component.plan(name, self._stored, self._member)
            except Exception as error:
                logger.debug("planning the load of %s", name, exc_info=True)
                plans[name] = ComponentPlan(problems=[failure_of(error).text])
        seen = self._joint.gather("plans", {name: plan.outlook for name, plan in plans.items()})
        nowhere = self._without_place(plans)
        problems = {name: _problems(chosen[name], [each[name] for each in seen], nowhere[name]) for name in plans}
        for name, plan in plans.items():
            plan.change = "; ".join(_by_rank([[each[name].change] for each in seen]))
            plan.resharded = any(each[name].resharded for each in seen)
            plan.notes = _by_rank([each[name].notes for each in seen])
        if any(problems.values()):
            raise CheckpointError(self._refusal(plans, problems))
        return plans

    def _without_place(self, plans: dict[str, ComponentPlan]) -> dict[str, set[str]]:
        """The keys of each component that no rank has a place for. Each tells a bit for each key of the checkpoint."""
        keys = [(name, key) for name in plans for key in self._stored.keys[name]]
        bits = "1" + "".join("01"[key in plans[name].unexpected] for name, key in keys)
        data = int(bits, 2).to_bytes((len(bits) + 7) // 8)
        common = bin(int.from_bytes(self._joint.common_bits("keys without a place", data)))[3:]
        found: dict[str, set[str]] = {name: set() for name in plans}
        for (name, key), bit in zip(keys, common, strict=True):
            if bit == "1":
                found[name].add(key)
        return found

    def _refusal(self, plans: dict[str, ComponentPlan], problems: dict[str, list[str]]) -> str:
        """One report for all ranks of why nothing was loaded."""
        bad = [name for name in plans if problems[name]]
        where = f"{self._stored.path} ({self._stored.origin}) on {ranks(self._member.world_size)}"
        lines = [f"cannot load {where}; nothing was changed:"]
        for name, plan in plans.items():
            kind = self._components[name].kind
            outcome = "; ".join(problems[name]) if problems[name] else f"loads, {plan.outcome}"
            lines.append(f"  {name} ({kind}): {outcome}")
        return "\n".join([*lines, f"To load the rest: exclude={bad}"])

    def _read(self, plans: dict[str, ComponentPlan], in_place: bool) -> None:
        targets = {name: plan.in_place if in_place else plan.target for name, plan in plans.items()}
        chosen = [name for name, target in targets.items() if target]
        nested = _below_their_heads({key: value for target in targets.values() for key, value in target.items()})
        changed = "; the components listed may have changed in part" if in_place else "; nothing was changed"
        self._joint.run_dcp(
            "reading in place" if in_place else "reading",
            f"cannot load {self._stored.path}: reading {', '.join(chosen)}{changed}",
            lambda group: dcp.load(nested, self._stored.reader, self._planner(group), group),
            is_wanted=bool(chosen),
        )
        for target in targets.values():
            target |= {key: _taken(nested, key) for key in target}

    def _planner(self, group: dist.ProcessGroup | None) -> RingLoadPlanner:
        """What a read leaves out is for the other read, or was looked at in the plans."""
        return RingLoadPlanner(process_group=group, unexpected="ignore", **self._options)

    def _prepare(self, plans: dict[str, ComponentPlan]) -> dict[str, Any]:
        ready: dict[str, Any] = {}
        failures: dict[str, Failure] = {}
        cause: Exception | None = None
        for name, plan in plans.items():
            try:
                ready[name] = plan.prepare(plan.target)
            except Exception as error:
                failures[name], cause = failure_of(error), cause or error
        seen = self._joint.gather("prepared", failures)
        problems: dict[str, list[str]] = {name: [] for name in plans}
        for name in {name for each in seen for name in each}:
            problems[name] = [described({rank: each[name] for rank, each in enumerate(seen) if name in each})]
        if any(problems.values()):
            raise CheckpointError(self._refusal(plans, problems)) from cause
        return ready

    def _take(self, plans: dict[str, ComponentPlan], ready: dict[str, Any]) -> dict[str, Remarks]:
        taken: dict[str, Remarks] = {}
        failed: tuple[str, Exception] | None = None
        for name in plans:
            try:
                before = [self._components[other] for other in taken]
                taken[name] = self._components[name].take(ready.pop(name), before)
            except Exception as error:  # the others go on, too, as components may have collectives of their own
                failed = failed or (name, error)
        if failed:
            what = f"{self._stored.path} was read, but could not be taken over; make the components anew"
            with self._joint.doing(f"{what}: component {failed[0]!r}"):
                raise failed[1]
        return taken

    def _remark(self, plans: dict[str, ComponentPlan], taken: dict[str, Remarks]) -> None:
        """Notes what did not come back as it was saved."""
        seen = self._joint.gather("remarks", {name: _asked(remarks) for name, remarks in taken.items()})
        for name, plan in plans.items():
            found = _by_rank([each[name] for each in seen])
            if found and self._member.rank == 0:
                logger.warning("component %r was loaded, but %s", name, "; ".join(found))
            plan.notes += found


def _below_their_heads(flat: dict[str, Any]) -> dict[str, Any]:
    """The same names to DCP, but few of them at the top: it looks at each value there, which takes its time."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        head, _, rest = key.partition(".")
        if rest and head not in flat:
            nested.setdefault(head, {})[rest] = value
        else:
            nested[key] = value
    return nested


def _taken(nested: dict[str, Any], key: str) -> Any:
    head, _, rest = key.partition(".")
    return nested[key] if key in nested else nested[head][rest]


def _by_rank(texts: Sequence[Sequence[str]]) -> list[str]:
    """What ranks have to say, each text once, with the ranks that say it if it is not all."""
    by_text: dict[str, list[int]] = {}
    for rank, own in enumerate(texts):
        for text in own:
            by_text.setdefault(text, []).append(rank)
    return [text if len(at) == len(texts) else f"{spans(at)}: {text}" for text, at in by_text.items()]


def _asked(remarks: Remarks) -> list[str]:
    try:
        return remarks()
    except Exception as error:
        return [f"it cannot be asked whether it has taken its state over ({failure_of(error).text})"]


def _problems(component: Component, seen: Sequence[Outlook], nowhere: set[str]) -> list[str]:
    """What any rank found wrong, and the keys that none has a place for."""
    found = _by_rank([plan.problems for plan in seen])
    if nowhere and not found and getattr(component, "strict", True):
        found.append(
            f"{some_are(nowhere)} in the checkpoint, but not here; Sharded(..., strict=False) passes them over"
        )
    return found
