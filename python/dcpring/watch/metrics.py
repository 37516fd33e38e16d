"""What a save or a load came to, told once it is over: a line in the log, and a function of the user's."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dcpring.report import Metrics

logger = logging.getLogger("dcpring")

MetricsFunction = Callable[[Metrics], object]


def checked_metrics(given: MetricsFunction | None) -> MetricsFunction | None:
    """The argument, if it is one. Raises TypeError."""
    if given is not None and not callable(given):
        raise TypeError(f"metrics={given!r}: must be a function that takes a Metrics, or None")
    return given


def tell(metrics: Metrics, function: MetricsFunction | None, *, is_logged: bool) -> None:
    """Logs a line at INFO, whose record has the numbers as attributes, and calls the function.

    What the function raises is logged, as the checkpoint is good.
    """
    if is_logged and logger.isEnabledFor(logging.INFO):
        logger.info("%s", metrics, extra=metrics.as_dict())
    if function is not None:
        try:
            function(metrics)
        except Exception:
            logger.warning("metrics= has raised; the %s of %s is good", metrics.operation, metrics.path, exc_info=True)
