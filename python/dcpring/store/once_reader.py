"""OnceReader: a RingReader for several loads from one checkpoint, by the ranks of one operation.

A Checkpointer and ``load_pretrained`` read the metadata, look at it, and then load in several calls of DCP's.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from dcpring.base.joint import Joint
from dcpring.format.lazy import LazyMetadata
from dcpring.report import Metrics
from dcpring.store.reader import RingReader
from dcpring.watch.metrics import tell


class OnceReader(RingReader):
    """A RingReader for several loads from one checkpoint, which reads its metadata once.

    Each load gets lazy metadata anew: to look at it costs it the tables by which RingLoadPlanner plans. What a load
    leaves out is for another one: nothing is said of it.

    Attributes:
        joint: an operation of all ranks that load, within which the metadata is read; None: this one is alone.
    """

    joint: Joint | None = None
    _kept: tuple[Metadata, Any, Any] | None = None  # with what its headers say; each load gets a run of its own

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.policy = replace(self.policy, unexpected="ignore")
        self._started = time.perf_counter()
        self._told: list[Metrics] = []

    def _tell(self, metrics: Metrics) -> None:
        self._told.append(metrics)

    @property
    def has_headers(self) -> bool:
        """Whether what is read is safetensors."""
        return self._load.files is not None

    def tell(self, rank: int) -> None:
        """Tells of all its loads as of one, once they are over."""
        size, busy = sum(each.bytes for each in self._told), sum(each.slowest_seconds for each in self._told)
        took = time.perf_counter() - self._started
        told = Metrics("load", str(self.path), size, took, 1, rank, busy)
        tell(told, self.metrics, is_logged=rank == 0)

    def _operation(self, is_shared: bool) -> contextlib.AbstractContextManager[Joint | None]:
        return contextlib.nullcontext(self.joint if is_shared else None)

    def _are_to_meet(self, path: Path) -> bool:
        return True  # in the operation they tell each other

    def _find_metadata(self, rank: int | None) -> Metadata:
        load = self._load
        if self._kept is None:
            metadata = super()._find_metadata(rank)
            self._kept = metadata, load.files, load.quantised
        metadata, load.files, load.quantised = self._kept
        return metadata.anew() if isinstance(metadata, LazyMetadata) else metadata
