"""Saves, and what each came to as OpenMetrics text: in a file that node_exporter's textfile collector picks up.

    python examples/openmetrics.py [checkpoints] [dcpring.prom]

``RingWriter(metrics=)``, and with ``dcpring.install(writer_options={"metrics": ...})`` any trainer's saves, call
``OpenMetrics`` on the coordinator once a save is committed. ``torch.profiler`` needs no more than to run: it shows the
phases of saves and loads by themselves, as ranges that begin with "dcpring".
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import dcpring

GAUGES = {
    "bytes": "Bytes that the last one wrote or read.",
    "seconds": "How long the last one took.",
    "slowest_rank_seconds": "How long its slowest rank wrote or read.",
    "step": "The step of the last one.",
}


class OpenMetrics:
    """Keeps the text in a file, which is replaced by a rename: who scrapes it never sees half of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._counts: dict[str, int] = {}
        self._last: dict[str, dict[str, float]] = {}
        self._lock = threading.Lock()  # saves in the background call from their own thread

    def __call__(self, metrics: dcpring.Metrics) -> None:
        with self._lock:
            self._counts[metrics.operation] = self._counts.get(metrics.operation, 0) + 1
            self._last[metrics.operation] = {
                "bytes": metrics.bytes,
                "seconds": metrics.seconds,
                "slowest_rank_seconds": metrics.slowest_seconds,
                "step": -1 if metrics.step is None else metrics.step,
            }
            unfinished = self.path.with_suffix(".tmp")
            unfinished.write_text(self.text())
            os.replace(unfinished, self.path)

    def text(self) -> str:
        lines = ["# TYPE dcpring_operations counter", "# HELP dcpring_operations Saves and loads that are over."]
        lines += [f'dcpring_operations_total{{operation="{name}"}} {n}' for name, n in self._counts.items()]
        for gauge, words in GAUGES.items():
            lines += [f"# TYPE dcpring_{gauge} gauge", f"# HELP dcpring_{gauge} {words}"]
            lines += [f'dcpring_{gauge}{{operation="{name}"}} {last[gauge]}' for name, last in self._last.items()]
        return "\n".join([*lines, "# EOF\n"])


def main(folder: str = "checkpoints", path: str = "dcpring.prom") -> None:
    metrics = OpenMetrics(Path(path))
    state = {"model": torch.nn.Linear(256, 256).state_dict(), "step": 0}
    with dcpring.install(writer_options={"metrics": metrics}, reader_options={"metrics": metrics}):
        for step in (100, 200):
            dcp.save({**state, "step": step}, checkpoint_id=f"{folder}/step-{step}", no_dist=True)
        dcp.load(state, checkpoint_id=f"{folder}/step-200", no_dist=True)
    print(metrics.path.read_text(), end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
