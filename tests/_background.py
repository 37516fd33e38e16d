"""The process of DCP's that saves in the background."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any


def process() -> Any:
    from torch.distributed.checkpoint import _async_process_executor as executor

    return executor._CHECKPOINT_PROCESS._save_process  # type: ignore[union-attr]


@contextlib.contextmanager
def ending_process() -> Iterator[None]:
    """What is saved here may start it; it is gone afterwards."""
    from torch.distributed.checkpoint import _async_process_executor as executor

    os.environ["MASTER_ADDR"] = "127.0.0.1"
    try:
        yield
    finally:
        with contextlib.suppress(AttributeError):
            executor._CHECKPOINT_PROCESS.__del__()  # type: ignore[union-attr]
        executor._CHECKPOINT_PROCESS = None
