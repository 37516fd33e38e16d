"""An epoch on 4 processes, then 2, then 3: killed in the middle of a save, every sample is still seen exactly once.

1. One process trains through one epoch, undisturbed: so we know what every loss should be.
2. 4 processes do the same, and save every few steps in the background. In the middle of a save all get `kill -9`.
3. 2 processes go on from the last checkpoint that was committed, up to another one.
4. 3 processes go on from that, to the end of the epoch.

Run it with `make elastic`. Exit status 0 means that every check passed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from dcpring import RNG, Checkpointer, ElasticLoader, ElasticSampler, Replicated

SAMPLES = 245
TOKENS = 32
GLOBAL_BATCH = 12
"""Samples of one step over all processes; 4, 2 and 3 divide it. The epoch's last step has what is left."""
STEPS = math.ceil(SAMPLES / GLOBAL_BATCH)
SAVE_EVERY = 3
KILLED_AT, STOPPED_AT = 9, 12
LAYERS = 2
"""Fewer than in the demo."""
LEARNING_RATE = 3e-4
WARM_UP_STEPS = 10
KILL_ATTEMPTS = 5
POLL_SECONDS = 0.003
# Another number of processes adds up the same gradients in another order.
TOLERANCE = 1e-3


class Windows(Dataset[tuple[int, Tensor]]):
    """Pieces of the source of argparse, each with its number."""

    def __init__(self) -> None:
        self.text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        start = index * (TOKENS + 1)
        return index, self.text[start : start + TOKENS + 1].long()


@dataclass(frozen=True)
class Leg:
    """What the processes of one leg do.

    Attributes:
        name: of their log.
        root: where logs and checkpoints lie.
        checkpoints: folder to go on from and to save to; None trains without.
        until: the step after which to save and stop.
    """

    name: str
    root: Path
    checkpoints: Path | None
    until: int

    def log(self, rank: int) -> Path:
        return self.root / f"{self.name}-{rank}.jsonl"


# ---- the training script ----


def work(rank: int, world: int, leg: Leg) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(str(leg.root / f"rendezvous-{leg.name}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    Training(leg, world).run()
    dist.destroy_process_group()


class Training:
    """A GPT over all processes (FSDP2), its AdamW, schedule, data and generators: all of it is saved."""

    def __init__(self, leg: Leg, world: int) -> None:
        self.leg, self.world = leg, world
        torch.manual_seed(0)
        gpt.LAYERS = LAYERS
        self.model = gpt.GPT()
        for module in (*self.model.blocks, self.model):
            fully_shard(module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1, (step + 1) / WARM_UP_STEPS)
        )
        sampler = ElasticSampler(SAMPLES, seed=7)
        self.loader = ElasticLoader(DataLoader(Windows(), GLOBAL_BATCH // world, sampler=sampler, num_workers=1))
        self.state = {"step": 0}

    def run(self) -> None:
        if self.leg.checkpoints is None:
            self.train(None)
            return
        components = {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.scheduler,
            "dataloader": self.loader,
            "rng": RNG(),
            "train_state": Replicated(self.state),
        }
        with Checkpointer(self.leg.checkpoints, components, keep_last=2) as checkpointer:
            report = checkpointer.load(missing_ok=True)
            self.log({"report": str(report)})
            self.train(checkpointer)

    def train(self, checkpointer: Checkpointer | None) -> None:
        batches = iter(self.loader)
        while self.state["step"] < self.leg.until:
            indices, windows = next(batches, (torch.empty(0, dtype=torch.int64), None))
            loss = self.step(windows)
            self.state["step"] += 1
            self.log({"step": self.state["step"], "samples": indices.tolist(), "loss": loss})
            if checkpointer is not None and self.state["step"] % SAVE_EVERY == 0:
                checkpointer.save(self.state["step"], blocking=False)

    def step(self, windows: Tensor | None) -> float:
        """One global step; a process that has run out of samples takes part with none."""
        rows = torch.tensor(0 if windows is None else len(windows))
        total = rows.clone()
        dist.all_reduce(total)
        tokens = torch.zeros(1, TOKENS + 1, dtype=torch.int64) if windows is None else windows
        losses = F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        share = losses * (rows > 0) / (total * TOKENS)
        (share * self.world).backward()  # FSDP takes the mean over processes
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        loss = share.detach()
        dist.all_reduce(loss)
        return loss.item()

    def log(self, record: dict[str, Any]) -> None:
        with self.leg.log(dist.get_rank()).open("a") as stream:
            stream.write(json.dumps(record) + "\n")


# ---- what happens to it ----


class Story:
    """Runs the legs, kills one, and checks what comes of it."""

    def __init__(self, root: Path, console: Console) -> None:
        self.root, self.console = root, console
        self.checkpoints = root / "checkpoints"
        self.failures = 0

    def check(self, passed: bool, text: str) -> None:
        self.console.print(f"  [bold {'green' if passed else 'red'}]{'✓' if passed else '✗'}[/] {text}")
        self.failures += not passed

    def run(self) -> None:
        self.console.rule(f"1/4  {STEPS} steps on one process, undisturbed", align="left")
        reference = self.finish(Leg("reference", self.root, None, STEPS), 1)
        self.console.rule("2/4  the same on 4, killed in the middle of a save", align="left")
        killed = self.kill_in_a_save()
        committed = self.committed()
        self.console.rule(f"3/4  2 processes go on from step {committed[-1]}", align="left")
        on_two = self.finish(Leg("two", self.root, self.checkpoints, STOPPED_AT), 2)
        self.console.rule(f"4/4  3 processes go on from step {STOPPED_AT}", align="left")
        on_three = self.finish(Leg("three", self.root, self.checkpoints, STEPS), 3)
        self.compare(reference, [(killed, committed[-1]), (on_two, STOPPED_AT), (on_three, STEPS)])

    def committed(self) -> list[int]:
        found = [path.parent.name for path in self.checkpoints.glob("step-*/.metadata")]
        return sorted(int(name.removeprefix("step-")) for name in found)

    def finish(self, leg: Leg, world: int) -> list[dict[str, Any]]:
        mp.spawn(work, (world, leg), nprocs=world)
        records = list(self.records(leg))
        for record in records:
            if "report" in record:
                self.console.print(f"  {record['report']}", style="dim", highlight=False)
                break
        return [record for record in records if "step" in record]

    def records(self, leg: Leg) -> Iterator[dict[str, Any]]:
        for path in sorted(self.root.glob(f"{leg.name}-*.jsonl")):
            lines = path.read_text().splitlines(keepends=True)
            yield from (json.loads(line) for line in lines if line.endswith("\n"))

    def kill_in_a_save(self) -> list[dict[str, Any]]:
        """Until a kill hits a save that is under way; on a fast disk it may already be over."""
        for attempt in range(KILL_ATTEMPTS):
            leg = Leg(f"killed{attempt}", self.root, self.checkpoints, STEPS)
            context = mp.spawn(work, (4, leg), nprocs=4, join=False)
            folder = self.checkpoints / f"step-{KILLED_AT}"
            while not list(folder.glob("*.distcp")):
                if context.join(timeout=POLL_SECONDS):
                    raise RuntimeError("the processes ended before they saved")
            for process in context.processes:
                os.kill(process.pid, signal.SIGKILL)
            for process in context.processes:
                process.join()
            if not (folder / ".metadata").exists():
                break
            shutil.rmtree(self.checkpoints)
        written = sum(path.stat().st_size for path in folder.iterdir())
        self.check(
            self.committed() == [KILLED_AT - 2 * SAVE_EVERY, KILLED_AT - SAVE_EVERY],
            f"kill -9 hit the save of step {KILLED_AT} with {written / 1e6:.0f} MB in its files; committed are "
            f"{self.committed()}",
        )
        return [record for record in self.records(leg) if "step" in record]

    def compare(self, reference: list[dict[str, Any]], legs: list[tuple[list[dict[str, Any]], int]]) -> None:
        self.console.rule("What came of it", align="left")
        seen: list[int] = []
        losses: dict[int, float] = {}
        done = 0
        for records, until in legs:
            # Steps that were trained after the checkpoint, and lost with it, were trained again.
            kept = [record for record in records if done < record["step"] <= until]
            seen += [index for record in kept for index in record["samples"]]
            losses |= {record["step"]: record["loss"] for record in kept}
            done = until
        self.check(
            sorted(seen) == list(range(SAMPLES)),
            f"{len(set(seen))} of {SAMPLES} samples were seen, {len(seen) - len(set(seen))} of them more than once",
        )
        expected = {record["step"]: record["loss"] for record in reference}
        worst = max(abs(losses.get(step, math.inf) - loss) for step, loss in expected.items())
        for step in sorted({1, KILLED_AT - SAVE_EVERY, KILLED_AT - SAVE_EVERY + 1, STOPPED_AT, STOPPED_AT + 1, STEPS}):
            self.console.print(
                f"  step {step:3}  undisturbed {expected[step]:.5f}  here {losses[step]:.5f}", highlight=False
            )
        self.check(worst <= TOLERANCE, f"the loss continues: largest difference {worst:.1e}, allowed {TOLERANCE:.0e}")
        leftovers = [path.name for path in self.checkpoints.iterdir() if not (path / ".metadata").exists()]
        self.check(not leftovers, f"nothing is left of the save that was killed; committed are {self.committed()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("build/elastic"), help="where checkpoints go (%(default)s)")
    arguments = parser.parse_args()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="run-", dir=arguments.dir)).resolve()
    began = time.monotonic()
    story = Story(root, Console(soft_wrap=True))
    try:
        story.run()
    finally:
        shutil.rmtree(root)
    story.console.print(f"{story.failures} checks failed, after {time.monotonic() - began:.0f} s.")
    return 1 if story.failures else 0


if __name__ == "__main__":
    sys.exit(main())
