"""Rounds of training that stops, in any way, and goes on with other ranks, from what a Checkpointer has saved."""

from __future__ import annotations

import hashlib
import random
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _resume import WORLDS, adamw, everything, spread, train
from soak.faults import Fault, random_fault
from soak.processes import Rank, resources, run
from soak.story import Story, require, require_no_growth

from dcpring import RNG, Checkpointer, Replicated, verify


@dataclass(frozen=True)
class Leg:
    """What happens between a start of the program and its end.

    Attributes:
        layout: how the model is spread; it says how many ranks there are.
        saves: for each step that is saved, whether the save is in the background.
        options: for ``Checkpointer``.
        fault: in the last save.
        seed: of the model before anything is loaded.
    """

    layout: str
    saves: tuple[bool, ...]
    options: dict[str, Any]
    fault: Fault | None
    seed: int

    @property
    def world_size(self) -> int:
        return WORLDS[self.layout]


class Counter:
    def __init__(self) -> None:
        self.step = 0
        self.history: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "history": list(self.history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.history = state["step"], list(state["history"])


def do_leg(rank: Rank, folder: Path, digests: Path, leg: Leg) -> tuple[int | None, list[dict[str, int]]]:
    """Loads, trains, and saves. Returns the step that was loaded, and what was held after each save if they are alike.

    Before a step is saved, rank 0 notes the digest of all that is in it.
    """
    model = spread(leg.layout, leg.seed)
    optimizer, counter = adamw(model), Counter()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    parts = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "counter": Replicated(counter),
        "rng": RNG(),
    }
    held: list[dict[str, int]] = []
    with Checkpointer(folder, parts, **leg.options) as checkpointer:
        loaded = checkpointer.load(missing_ok=True).step
        if loaded is not None:
            found = _digest(model, optimizer, counter)
            noted = {path.read_text() for path in digests.glob(f"{loaded}.*")}
            assert found in noted, f"step {loaded} is not what was saved as step {loaded}"
            assert counter.step == loaded
        for number, in_background in enumerate(leg.saves):
            train(model, optimizer, 1)
            scheduler.step()
            counter.step += 1
            counter.history.append(rank.world_size)
            digest = _digest(model, optimizer, counter)
            if rank.rank == 0:
                (digests / f"{counter.step}.{hashlib.sha1(digest.encode()).hexdigest()}").write_text(digest)
            is_last = number == len(leg.saves) - 1
            if is_last:
                _meet()
                rank.begun()
            with leg.fault.planted(rank.rank) if leg.fault and is_last else nullcontext():
                checkpointer.save(counter.step, blocking=not in_background)
                if is_last:
                    checkpointer.wait()
            held.append(resources(held[1] if len(held) > 1 else None))
    return loaded, held if len(set(leg.saves)) == 1 else []


def _digest(model: Any, optimizer: Any, counter: Counter) -> str:
    summed = hashlib.sha256(repr((counter.state_dict(), optimizer.param_groups[0]["lr"])).encode())
    for name, value in sorted(everything(model, optimizer).items()):
        summed.update(repr(name).encode())
        raw = value.contiguous().reshape(-1).view(torch.uint8) if isinstance(value, torch.Tensor) else value
        summed.update(bytes(raw.tolist()) if isinstance(raw, torch.Tensor) else repr(raw).encode())
    return summed.hexdigest()


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


class Round:
    def __init__(self, chance: random.Random, folder: Path, story: Story) -> None:
        self._chance = chance
        self._folder = folder / "steps"
        self._digests = folder / "digests"
        self._digests.mkdir()
        self._story = story
        self._last: int | None = None
        self._options: dict[str, Any] = {
            "keep_last": chance.choice((None, 1, 2)),
            "keep_every": chance.choice((None, None, 3)),
        }

    def play(self) -> None:
        for _ in range(self._chance.randint(2, 5)):
            self.run(self._random_leg())

    def run(self, leg: Leg) -> None:
        """One start of the program. It goes on from the last step that is there."""
        self._story.tell(f"{leg}; saved is step {self._last}")
        disturbance = leg.fault.disturbance(1.0) if leg.fault else None
        answers = run(leg.world_size, do_leg, self._folder, self._digests, leg, disturbance=disturbance)
        is_good = all(answer.ok for answer in answers)
        self._story.tell(f"{sum(not answer.ok for answer in answers)} of {leg.world_size} ranks failed")
        if leg.fault is None:
            require(is_good, "a leg failed", answers)
        else:
            require(not any("is not what was saved" in a.error for a in answers), "wrong values", answers)
            leg.fault.judge(answers)
        begun = [answer.value[0] for answer in answers if answer.ok]
        require(all(step == self._last for step in begun), f"ranks have loaded steps {begun}, not {self._last}")
        if is_good:
            self._last = (self._last or 0) + len(leg.saves)
            for answer in answers:
                require_no_growth(answer.value[1])
        else:
            self._last = self._after_a_failure()
        self._look()

    def _random_leg(self) -> Leg:
        layout = self._chance.choice(sorted(WORLDS))
        saves = tuple(self._chance.random() < 0.5 for _ in range(self._chance.choice((1, 2, 2, 4))))
        if self._chance.random() < 0.5:
            saves = saves[:1] * len(saves)
        fault = None
        if self._chance.random() < 0.6:
            fault = random_fault(self._chance, "save", WORLDS[layout], 1 << 18, False)
        return Leg(layout, saves, self._options, fault, self._chance.randrange(100))

    def _after_a_failure(self) -> int | None:
        """What is there is what was saved before, or any of the steps of the leg, from which the next goes on."""
        steps, last = self._steps(), self._last
        newest = max(steps, default=None)
        require(last is None or (newest is not None and newest >= last), f"step {last} is gone; there are {steps}")
        return newest

    def _steps(self) -> list[int]:
        return sorted(int(path.parent.name.removeprefix("step-")) for path in self._folder.glob("step-*/.metadata"))

    def _look(self) -> None:
        for step in self._steps():
            report = verify(self._folder / f"step-{step}")
            require(report.ok, f"verify: {report}")


def play(chance: random.Random, folder: Path, story: Story) -> None:
    Round(chance, folder, story).play()
