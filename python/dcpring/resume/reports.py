"""What a load tells the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dcpring.base.text import ranks
from dcpring.resume.components import Component, ComponentPlan, Member
from dcpring.resume.manifest import Stored

Action = Literal["loaded", "resharded", "skipped"]


@dataclass(frozen=True)
class ComponentReport:
    """What became of one component.

    Attributes:
        kind: "sharded", "replicated", "per_rank", "elastic"; "" where the checkpoint does not say.
        action: "loaded" as it was saved, "resharded" to other ranks or another mesh, or "skipped".
        detail: in words.
    """

    kind: str
    action: Action
    detail: str


@dataclass(frozen=True)
class ResumeReport:
    """What a load did; the same on every rank.

    Attributes:
        step: that was loaded; None if there was no checkpoint and ``missing_ok``.
        path: its folder.
        saved_world_size: ranks that saved it, None where it does not say.
        world_size: ranks that loaded it.
        components: by name.
        passed_over: with ``fallback``, newer steps that were damaged, the newest first, and what was wrong with each.
    """

    step: int | None
    path: str = ""
    saved_world_size: int | None = None
    world_size: int = 1
    components: dict[str, ComponentReport] = field(default_factory=dict)
    passed_over: dict[int, str] = field(default_factory=dict)

    def names(self, action: Action) -> list[str]:
        return [name for name, report in self.components.items() if report.action == action]

    def __str__(self) -> str:
        if self.step is None:
            return "no checkpoint to load"
        lines = [f"  {name}: {report.action}, {report.detail}" for name, report in self.components.items()]
        saved = ranks(self.saved_world_size) if self.saved_world_size else "an unknown number of ranks"
        lines += [f"  passed over: step {step}, damaged: {why}" for step, why in self.passed_over.items()]
        return "\n".join([f"{self.path}: saved by {saved}, loaded by {ranks(self.world_size)}", *lines])


def report_of(
    step: int, stored: Stored, plans: Mapping[str, ComponentPlan], components: Mapping[str, Component], member: Member
) -> ResumeReport:
    reports: dict[str, ComponentReport] = {}
    for name in dict.fromkeys([*components, *stored.keys]):
        kind = components[name].kind if name in components else stored.entry(name).get("kind", "")
        plan = plans.get(name)
        if plan is None:
            where = "left out" if name in stored.keys else "not in the checkpoint"
            reports[name] = ComponentReport(kind, "skipped", where)
        else:
            reports[name] = ComponentReport(kind, "resharded" if plan.resharded else "loaded", plan.outcome)
    return ResumeReport(step, stored.path, stored.world_size, member.world_size, reports)
