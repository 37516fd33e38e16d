"""The demo: a GPT is trained, saved with dcpring, and resumed on another number of processes with nothing lost.

Run it with `make demo`. Exit status 0 means that every check passed.
"""

from __future__ import annotations

import argparse
import io
import queue
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch.multiprocessing as mp
from jobs import Lap, Plan, Raced, Resumed, Saved, Stage, Tick, Trained, resume_and_race, train_and_save
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

TRAINERS, RESUMERS = 4, 2
# Loaded once, by the process that all others are forked from: it takes seconds.
LOADED_ONCE = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "dcpring.state_dict",
]
STAGES = 5
# Two processes add up the same gradients in another order than four do.
TOLERANCE = 1e-4


class Screen:
    """Shows the stages, each with a progress bar, or with a few plain lines where there is no terminal."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.bar: Progress | None = None
        self.stages = self.done = self.total = 0
        self.failures = 0

    def say(self, text: str) -> None:
        self.console.print(Padding(Text(text), (0, 2)))

    def show(self, renderable: Table | Text) -> None:
        self.console.print()
        self.console.print(Padding(renderable, (0, 2)))
        self.console.print()

    def check(self, passed: bool, text: str) -> None:
        mark = Text("✓ ", "bold green") if passed else Text("✗ ", "bold red")
        self.console.print(Padding(mark.append(text, "not bold default"), (0, 2)))
        self.failures += not passed

    def begin(self, stage: Stage) -> None:
        self.end()
        self.stages += 1
        self.done, self.total = 0, stage.total
        self.console.print()
        self.console.print(Rule(Text(f"{self.stages}/{STAGES}  {stage.title}", "bold"), align="left", style="cyan"))
        self.say(stage.sentence)
        if self.console.is_terminal:
            detail = TextColumn("{task.description}", style="dim")
            self.bar = Progress(TextColumn(""), BarColumn(32), MofNCompleteColumn(), TimeElapsedColumn(), detail)
            self.bar.add_task("", total=stage.total)
            self.bar.start()

    def tick(self, detail: str) -> None:
        self.done += 1
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], advance=1, description=detail)
        elif self.done * 4 // self.total > (self.done - 1) * 4 // self.total:
            self.say(f"{self.done}/{self.total}  {detail}")

    def end(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def run_job(screen: Screen, job: Callable[..., None], world: int, plan: Plan) -> Iterator[Any]:
    """Run `job` on `world` processes: its progress is shown, its results are yielded."""
    events = mp.get_context("forkserver").Queue()
    processes: Any = mp.start_processes(
        job, (world, plan, events), nprocs=world, join=False, daemon=True, start_method="forkserver"
    )
    starting = screen.console.status(f"Starting {world} processes ...")
    starting.start()
    try:
        for event in events_of(processes, events):
            starting.stop()
            if isinstance(event, Stage):
                screen.begin(event)
            elif isinstance(event, Tick):
                screen.tick(event.detail)
            else:
                screen.end()
                yield event
    finally:
        starting.stop()
        screen.end()
        for process in processes.processes:
            process.terminate()
            process.join()


def events_of(processes: mp.ProcessContext, events: Any) -> Iterator[Any]:
    """Until all processes have ended and all that they told has been read. Raises when one of them fails."""
    ended = False
    while True:
        try:
            yield events.get(timeout=0.2)
        except queue.Empty:
            if ended:
                return
            ended = processes.join(timeout=0)


def train(screen: Screen, plan: Plan) -> list[float]:
    """The losses of the first job, before and after the checkpoint."""
    losses: list[float] = []
    for result in run_job(screen, train_and_save, TRAINERS, plan):
        if isinstance(result, Saved):
            speed = result.size_bytes / result.seconds / 1e9
            screen.check(
                True,
                f"{result.keys} keys, {result.size_bytes / 1e6:.0f} MB in {result.files} files: "
                f"safely on disk after {result.seconds:.2f} s, {speed:.2f} GB/s ({result.how})",
            )
        elif isinstance(result, Trained):
            losses = result.losses
    return losses


def resume(screen: Screen, plan: Plan, losses: list[float]) -> None:
    """Everything that the second job must show."""
    for result in run_job(screen, resume_and_race, RESUMERS, plan):
        if isinstance(result, Resumed):
            show_resumed(screen, result, losses)
        elif isinstance(result, Raced):
            show_race(screen, result)


def show_resumed(screen: Screen, result: Resumed, losses: list[float]) -> None:
    start = len(losses) - len(result.losses)
    differences = [abs(again - first) for first, again in zip(losses[start:], result.losses, strict=True)]
    table = Table("step", f"{TRAINERS} processes\nwent on", f"{RESUMERS} processes\nresumed", "difference\n", box=None)
    for column in table.columns:
        column.justify = "right"
    for step, again, difference in zip(range(start, len(losses)), result.losses, differences, strict=True):
        table.add_row(str(step + 1), f"{losses[step]:.6f}", f"{again:.6f}", f"{difference:.1e}")
    screen.show(chart(losses, result.losses))
    screen.show(table)
    wrong = ", ".join(result.wrong_keys[:3])
    screen.check(
        not wrong,
        f"Parameters and optimizer state: {result.keys - len(result.wrong_keys)} of {result.keys} keys "
        f"are bit for bit what was saved (SHA-256){': not ' if wrong else ''}{wrong}",
    )
    screen.check(
        max(differences) <= TOLERANCE,
        f"The loss curve continues: largest difference {max(differences):.1e}, "
        f"allowed {TOLERANCE:.0e} (float sums are taken in another order)",
    )


def chart(losses: list[float], resumed: list[float], rows: int = 10, columns: int = 66) -> Text:
    """Both loss curves, drawn with characters. `resumed` holds the last steps once more."""
    start = len(losses) - len(resumed)
    stride = -(-len(losses) // columns)
    low, high = min(losses + resumed), max(losses + resumed)

    def row_of(loss: float) -> int:
        return round((high - loss) / (high - low or 1.0) * (rows - 1))

    def mark(row: int, step: int) -> tuple[str, str]:
        first = row_of(losses[step]) == row
        again = step >= start and row_of(resumed[step - start]) == row
        if first and again:
            return "◉", "bold green"
        return ("○", "bold red") if again else ("•", "cyan") if first else (" ", "")

    text = Text.assemble(("loss\n", "dim"))
    for row in range(rows):
        text.append(f"{high - (high - low) * row / (rows - 1):5.2f} ", "dim")
        for step in range(0, len(losses), stride):
            text.append("┊" if 0 <= step - start < stride else "", "yellow")
            text.append(*mark(row, step))
        text.append("\n")
    legend = (("•", "cyan"), " first job   ", ("○", "bold red"), " resumed   ", ("◉", "bold green"), " both   ")
    return text.append_text(Text.assemble(*legend, ("┊", "yellow"), f" checkpoint, after step {start}"))


def show_race(screen: Screen, result: Raced) -> None:
    stock, ours = result.laps
    cached = max(lap.still_cached for lap in result.laps)
    if cached < 0.01:
        cold, meaning = "load, cold", f"Cold: the files were dropped from the page cache ({cached:.0%} was left there)."
    else:
        cold, meaning = "load, mixed", f"Mixed: up to {cached:.0%} of the files stayed in the page cache."
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", "size", "files", "save, durable", cold, "load, warm"):
        table.add_column(heading, justify="right" if heading else "left")
    for lap in (stock, ours):
        speeds = (seconds_and_speed(lap, times) for times in (lap.save, lap.cold, lap.warm))
        table.add_row(lap.name, f"{lap.size_bytes / 1e6:.1f} MB", str(lap.files), *speeds)
    table.add_row()
    pairs = ((stock.save, ours.save), (stock.cold, ours.cold), (stock.warm, ours.warm))
    table.add_row("stock : dcpring", "", "", *(f"{median(a) / median(b):.1f}x" for a, b in pairs), style="bold")
    screen.show(table)
    rounds = f"{len(ours.save)} round{'s' * (len(ours.save) > 1)}"
    screen.say(
        f"Medians of {rounds} over whole dcp.save and dcp.load calls, planning included. "
        f"{meaning} Warm: all of them were in it."
    )
    screen.say(f"dcpring saved with {ours.saved_how}; its first load of each round used {ours.loaded_how}.")
    failed = "".join(f"; NOT {load}" for load in result.wrong_loads)
    screen.check(
        not failed,
        f"{result.loads - len(result.wrong_loads)} of {result.loads} loads gave back every tensor bit for bit, "
        f"stock reading dcpring's files and the reverse among them{failed}",
    )


def seconds_and_speed(lap: Lap, times: list[float]) -> Text:
    speed = f"{lap.size_bytes / median(times) / 1e9:.2f} GB/s"
    return Text.assemble(f"{median(times):.2f} s\n", (speed, "dim"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=20, help="training steps before the checkpoint (default: %(default)s)"
    )
    parser.add_argument(
        "--dir", type=Path, default=Path("build/demo"), help="where checkpoints go (default: %(default)s)"
    )
    parser.add_argument("--after", type=int, default=8, help="training steps after it (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the race (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave the first job's checkpoint there")
    arguments = parser.parse_args()
    if min(arguments.steps, arguments.after, arguments.rounds) < 1:
        parser.error("--steps, --after and --rounds must be at least 1")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    began = time.monotonic()
    mp.set_forkserver_preload(LOADED_ONCE)
    screen = Screen()
    screen.console.print(Text("dcpring demo: train, save, resume on fewer processes, lose nothing", "bold"))
    arguments.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=arguments.dir)).resolve()
    plan = Plan(directory, arguments.steps, arguments.after, arguments.rounds)
    try:
        losses = train(screen, plan)
        resume(screen, plan, losses)
    except KeyboardInterrupt:
        screen.say("Interrupted.")
        return 130
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        screen.check(False, f"A process failed.\n{error}")
        return 1
    finally:
        if arguments.keep:
            screen.say(f"The checkpoint is kept in {plan.checkpoint}")
        else:
            shutil.rmtree(directory)
    screen.console.print()
    verdict = f"Failed checks: {screen.failures}" if screen.failures else "Every check passed"
    screen.check(not screen.failures, f"{verdict}, after {time.monotonic() - began:.0f} s.")
    return 1 if screen.failures else 0


if __name__ == "__main__":
    sys.exit(main())
