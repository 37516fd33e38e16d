"""Functions for ``metrics=`` that hand the numbers of saves and loads to what people watch trainings with.

    from dcpring.metrics import to_tensorboard

    RingWriter(path, metrics=to_tensorboard(SummaryWriter("runs")))
    dcpring.install(writer_options={"metrics": to_prometheus()})

Each gives a function that takes a ``Metrics``. A save is told on the coordinator, a load on each rank. None of these
libraries is needed by dcpring: a function asks for what you give it, or imports the library when you call it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dcpring.report import Metrics

__all__ = ["to_logger", "to_opentelemetry", "to_prometheus", "to_tensorboard", "to_wandb"]

_NUMBERS = ("bytes", "seconds", "bytes_per_second", "slowest_seconds")


def _numbers(metrics: Metrics) -> dict[str, float]:
    """As "checkpoint/save_seconds" and so on."""
    return {f"checkpoint/{metrics.operation}_{name}": getattr(metrics, name) for name in _NUMBERS}


def to_tensorboard(writer: Any) -> Callable[[Metrics], None]:
    """Scalars of a ``torch.utils.tensorboard.SummaryWriter``, by the step that the checkpoint's path names."""

    def told(metrics: Metrics) -> None:
        for name, value in _numbers(metrics).items():
            writer.add_scalar(name, value, metrics.step)

    return told


def to_wandb(run: Any) -> Callable[[Metrics], None]:
    """A row of a run of Weights & Biases (``wandb.init()``), with the step as a column of its own.

    The run's own step only ever grows, and a save in the background ends when it is beyond the checkpoint's.
    """

    def told(metrics: Metrics) -> None:
        step = {} if metrics.step is None else {"checkpoint/step": metrics.step}
        run.log(_numbers(metrics) | step)

    return told


def to_logger(logger: Any) -> Callable[[Metrics], None]:
    """``log_metrics`` of a logger of Lightning's."""

    def told(metrics: Metrics) -> None:
        logger.log_metrics(_numbers(metrics), step=metrics.step)

    return told


def to_prometheus(registry: Any = None) -> Callable[[Metrics], None]:
    """Counters and a gauge of ``prometheus_client``, by operation ("save" or "load").

    ``dcpring_operations_total``, ``dcpring_bytes_total``, ``dcpring_seconds_total``, ``dcpring_last_step``.

    Args:
        registry: a ``CollectorRegistry``; None: prometheus_client's own. Call this once for each.

    Raises:
        ImportError: prometheus_client is not installed.
    """
    from prometheus_client import REGISTRY, Counter, Gauge

    where: dict[str, Any] = {"labelnames": ("operation",), "registry": REGISTRY if registry is None else registry}
    operations = Counter("dcpring_operations", "Saves and loads of checkpoints that ended well.", **where)
    size = Counter("dcpring_bytes", "Bytes that saves have written and loads have read.", **where)
    seconds = Counter("dcpring_seconds", "Seconds that saves and loads have taken.", **where)
    last = Gauge("dcpring_last_step", "The step that the path of the last checkpoint names.", **where)

    def told(metrics: Metrics) -> None:
        operations.labels(metrics.operation).inc()
        size.labels(metrics.operation).inc(metrics.bytes)
        seconds.labels(metrics.operation).inc(metrics.seconds)
        if metrics.step is not None:
            last.labels(metrics.operation).set(metrics.step)

    return told


def to_opentelemetry(tracer: Any = None) -> Callable[[Metrics], None]:
    """A span "dcpring.save" or "dcpring.load" for each, with its beginning, end and numbers.

    Args:
        tracer: of ``opentelemetry.trace``; None: ``get_tracer("dcpring")``.

    Raises:
        ImportError: opentelemetry-api is not installed.
    """
    if tracer is None:
        from opentelemetry import trace

        tracer = trace.get_tracer("dcpring")

    def told(metrics: Metrics) -> None:
        end = time.time_ns()
        span = tracer.start_span(f"dcpring.{metrics.operation}", start_time=end - int(metrics.seconds * 1e9))
        span.set_attributes(
            {f"dcpring.{name}": value for name, value in metrics.as_dict().items() if value is not None}
        )
        span.end(end)

    return told
