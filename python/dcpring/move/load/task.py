"""What one read_data has to do: of which checkpoint, by which rules, and what is known of it by now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlanner

from dcpring.format.quantised import Quantised
from dcpring.format.safetensors import Place
from dcpring.format.unpickler import Trust
from dcpring.move.crc import RunningCrcs
from dcpring.move.load.boxes import Coded, Payload
from dcpring.move.load.inputs import Inputs
from dcpring.move.load.wanted import Wanted
from dcpring.names.policy import Casts
from dcpring.options import IOOptions, IOStats
from dcpring.plan.run import LoadRun


@dataclass(frozen=True)
class Origin:
    """A checkpoint's data, and what several loads of it share.

    Attributes:
        path: its directory, as errors name it too.
        links: see ``Inputs``.
        quantised: tensors that are made of others, by their place.
        inputs: open files, which stay open after a load; None: each load opens its own, and closes them.
        sums: of records of which each load reads a part; None: each load reads whole records, or checks none.
    """

    path: str
    links: Mapping[str, str] | None = None
    quantised: Mapping[Place, Quantised] = field(default_factory=dict)
    inputs: Inputs | None = None
    sums: RunningCrcs | None = None


@dataclass(frozen=True)
class Rules:
    """How a load reads, what it believes, and what it changes.

    Attributes:
        options: of the core.
        trusted: what is done with objects that are more than plain data.
        safe_globals: what objects may refer to besides.
        casts: which are allowed.
        transforms: DCP's, by which a record's descriptors are undone.
    """

    options: IOOptions
    trusted: Trust = False
    safe_globals: Sequence[Any] = ()
    casts: Casts = "round"
    transforms: Any = None


@dataclass(frozen=True)
class Task:
    """One read_data. Everything that is loaded goes by its position among the items, in errors too.

    Attributes:
        stats: where it is counted.
        rank: of this process, for errors; None where no state dict is loaded, and so none is changed.
        wanted: what is loaded, but for what a compact plan has without an object of Python for each.
        payloads: of those of it that are plain tensors.
    """

    planner: LoadPlanner
    origin: Origin
    rules: Rules
    stats: IOStats
    run: LoadRun
    rank: int | None = None
    wanted: dict[int, Wanted] = field(default_factory=dict)
    payloads: dict[int, Payload | Coded] = field(default_factory=dict)
