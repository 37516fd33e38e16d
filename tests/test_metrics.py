"""What a save or a load came to: one line of the log, and the numbers for a function of the user's."""

from __future__ import annotations

import logging
import pickle
import re
import runpy
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

import dcpring
from dcpring import Checkpointer, Metrics, Replicated, RingReader, RingSavePlanner, RingWriter, metrics
from dcpring.torchside import versions

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "openmetrics.py"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "dcpring"]


@pytest.mark.parametrize("planner", [None, RingSavePlanner()])
def test_one_line_for_a_save_and_one_for_a_load(planner: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, told = tmp_path / "step-300", list[Metrics]()
    state = {"w": torch.ones(1 << 18)}
    with caplog.at_level(logging.INFO, "dcpring"):
        dcp.save(state, storage_writer=RingWriter(path, metrics=told.append), planner=planner, no_dist=True)
        dcp.load(state, storage_reader=RingReader(path, metrics=told.append), no_dist=True)
    saved, loaded = lines(caplog)
    number = r"[\d.]+"
    assert re.fullmatch(
        rf"saved {path}: step 300, 1.0 MiB in {number} s \({number} GB/s\) by 1 rank, slowest rank 0: {number} s", saved
    )
    assert re.fullmatch(rf"loaded {path}: step 300, 1.0 MiB in {number} s \({number} GB/s\) by rank 0", loaded)
    save, load = told
    assert (save.operation, save.step, save.ranks, save.slowest_rank) == ("save", 300, 1, 0)
    assert save.bytes == sum(file.stat().st_size for file in path.glob("*.distcp"))
    assert 0 < save.slowest_seconds < save.seconds and save.bytes_per_second == save.bytes / save.seconds
    assert (load.operation, load.path) == ("load", str(path)) and 0 < load.slowest_seconds < load.seconds


def _on_ranks(folder: str) -> list[tuple[int, int, int | None]]:
    told: list[Metrics] = []
    state = {"w": torch.ones(1 << 16), f"mine{dist.get_rank()}": torch.ones(10)}
    writer = RingWriter(f"{folder}/a", metrics=told.append)
    dcp.save(state, storage_writer=writer, planner=RingSavePlanner())
    dcp.load(state, storage_reader=RingReader(f"{folder}/a", metrics=told.append))
    return [(each.ranks, each.bytes, each.slowest_rank) for each in told]


def test_a_save_is_told_of_once_and_a_load_on_every_rank(tmp_path: Path) -> None:
    first, second = _distributed.run(2, _on_ranks, str(tmp_path))
    total = sum(file.stat().st_size for file in (tmp_path / "a").glob("*.distcp"))
    assert first[0][:2] == (2, total) and first[0][2] in (0, 1)
    assert len(first) == 2 and len(second) == 1 and second[0][2] == 1


def test_a_checkpointers_load_is_one_though_it_reads_several_times(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Metrics] = []
    options = {"metrics": told.append}
    state = {"a": Replicated({"x": 1}), "m": torch.nn.Linear(2, 2)}
    with (
        caplog.at_level(logging.INFO, "dcpring"),
        Checkpointer(tmp_path, state, writer_options=options, reader_options=options) as checkpointer,
    ):
        checkpointer.save(7, blocking=False)
        checkpointer.wait()
        checkpointer.load()
    assert [(each.operation, each.step) for each in told] == [("save", 7), ("load", 7)]
    assert [line.split(":")[0] for line in lines(caplog)] == [
        f"{word} {tmp_path}/step-7" for word in ("saved", "loaded")
    ]


def test_a_function_that_raises_does_not_spoil_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def raises(metrics: Metrics) -> None:
        raise KeyError("mine")

    dcpring.save({"a": 1}, tmp_path, writer_options={"metrics": raises})
    assert f"metrics= has raised; the save of {tmp_path} is good" in lines(caplog)
    assert dcpring.load(tmp_path) == {"a": 1}
    with pytest.raises(TypeError, match="metrics=3"):
        RingWriter(tmp_path, metrics=3)  # type: ignore[arg-type]


def test_a_function_that_cannot_be_pickled_stays_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """DCP pickles the writer for the process that saves."""
    versions.say_once.cache_clear()
    writer = RingWriter(tmp_path, metrics=lambda metrics: None, progress=print)
    copy = pickle.loads(pickle.dumps(writer))
    assert copy.metrics is None and copy.progress is print and writer.metrics is not None
    assert ["metrics= of RingWriter cannot be pickled" in line for line in lines(caplog)] == [True]


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("a/step-12", 12),
        ("a/step_12/", 12),
        ("a/my-step-12", 12),
        ("exp/step-300/model", 300),
        ("step-1/step-2/hf", 2),
        ("global_step_7", 7),
        ("global_step7", 7),
        ("checkpoint-500", 500),
        ("epoch=3-step=400", 400),
        ("a/12/", None),
        ("qwen2.5", None),
        ("llama3", None),
        ("run-2026", None),
        ("final_v2", None),
        ("misstep-3", None),
        ("checkpoint-7b-instruct", None),
        ("best", None),
    ],
)
def test_only_what_is_called_a_step_is_one(path: str, step: int | None) -> None:
    """Dashboards took the last digits of any name for one."""
    assert Metrics("save", path, 0, 0.0).step == step


def test_the_example_gives_openmetrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))["main"](str(tmp_path / "ckpt"), str(tmp_path / "d.prom"))
    text = capsys.readouterr().out
    assert 'dcpring_operations_total{operation="save"} 2\n' in text and text.endswith("# EOF\n")
    assert 'dcpring_step{operation="save"} 200\n' in text and 'dcpring_operations_total{operation="load"} 1\n' in text
    for line in text.splitlines():
        assert line.startswith("# ") or re.fullmatch(r'\w+\{operation="\w+"\} [\d.e-]+', line), line


# ---- what people watch trainings with ----


class Seen(list[tuple[str, object, object]]):
    """A SummaryWriter, a run of W&B and a logger of Lightning's in one: what they were given."""

    def add_scalar(self, name: str, value: float, step: int | None) -> None:
        self.append((name, value, step))

    def log(self, row: dict[str, float]) -> None:
        self.extend((name, value, "wandb") for name, value in row.items())

    def log_metrics(self, row: dict[str, float], step: int | None) -> None:
        self.extend((name, value, step) for name, value in row.items())


SAVED = Metrics("save", "/ckpt/step-7", 1000, 2.0, 4, 3, 1.5)


@pytest.mark.parametrize("make", [metrics.to_tensorboard, metrics.to_wandb, metrics.to_logger])
def test_numbers_go_to_a_logger(make: Callable[[object], Callable[[Metrics], None]]) -> None:
    seen = Seen()
    make(seen)(SAVED)
    step = "wandb" if make is metrics.to_wandb else 7
    numbers = {"bytes": 1000, "seconds": 2.0, "bytes_per_second": 500.0, "slowest_seconds": 1.5}
    assert {(f"checkpoint/save_{name}", value, step) for name, value in numbers.items()} <= set(seen)
    assert ("checkpoint/step", 7, "wandb") in seen or make is not metrics.to_wandb


def test_counters_of_prometheus(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    told = metrics.to_prometheus(registry)
    for number in (1, 2):
        writer = RingWriter(tmp_path / f"step-{number}", metrics=told)
        dcp.save({"w": torch.ones(100)}, storage_writer=writer, no_dist=True)
    by_save = {"operation": "save"}
    assert registry.get_sample_value("dcpring_operations_total", by_save) == 2
    assert registry.get_sample_value("dcpring_last_step", by_save) == 2
    written = sum(file.stat().st_size for file in tmp_path.glob("*/*.distcp"))
    assert registry.get_sample_value("dcpring_bytes_total", by_save) == written


def test_spans_of_opentelemetry() -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    metrics.to_opentelemetry(provider.get_tracer("tests"))(SAVED)
    (span,) = spans.get_finished_spans()
    assert span.name == "dcpring.save" and span.end_time - span.start_time == 2_000_000_000
    assert span.attributes["dcpring.path"] == "/ckpt/step-7" and span.attributes["dcpring.step"] == 7


def test_a_record_of_the_log_has_the_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dcpring"):
        dcp.save({"w": torch.ones(100)}, storage_writer=RingWriter(tmp_path / "step-4"), no_dist=True)
    record = vars(caplog.records[-1])
    assert (record["operation"], record["step"], record["rank"]) == ("save", 4, 0)
    assert record["bytes"] > 400 and record["seconds"] > 0 and record["host"] == socket.gethostname()
