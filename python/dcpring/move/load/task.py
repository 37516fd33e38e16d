"""One call of ``read_data``: which checkpoint it reads, by which rules, and the files that it opens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from dcpring.format.quantised import Quantised
from dcpring.format.safetensors import Place
from dcpring.format.unpickler import Trust
from dcpring.move.crc import RunningCrcs
from dcpring.move.load.inputs import Inputs
from dcpring.names.policy import Casts
from dcpring.options import IOOptions, IOStats
from dcpring.plan.run import Load


@dataclass(frozen=True)
class Origin:
    """A checkpoint's data, and what several loads of it share.

    Attributes:
        path: its directory, which errors name too.
        links: see ``Inputs``.
        quantised: the tensors that are computed from others, by their place.
        inputs: open files, which stay open after a load; None: each load opens its own and closes them.
        sums: the CRCs of records of which each load reads a part; None: each load reads whole records, or checks none.
    """

    path: str
    links: Mapping[str, str] | None = None
    quantised: Mapping[Place, Quantised] = field(default_factory=dict)
    inputs: Inputs | None = None
    sums: RunningCrcs | None = None


@dataclass(frozen=True)
class Rules:
    """How a load reads, which objects it believes, and which casts it makes.

    Attributes:
        options: of the core.
        trusted: whether objects that are more than plain data are unpickled.
        safe_globals: what objects may refer to besides.
        casts: which casts are allowed.
        transforms: DCP's, which undo what a record's descriptors name.
    """

    options: IOOptions
    trusted: Trust = False
    safe_globals: Sequence[Any] = ()
    casts: Casts = "round"
    transforms: Any = None


@dataclass(frozen=True)
class Task:
    """One call of ``read_data``. Everything that is loaded is known by its position in the plan.

    Attributes:
        item: makes DCP's item of a position.
        stats: where the load is counted.
        rank: of this process, for errors; None where no state dict is loaded, and so none is changed.
    """

    planner: LoadPlanner
    item: Callable[[int], ReadItem]
    origin: Origin
    rules: Rules
    stats: IOStats
    load: Load
    rank: int | None = None
