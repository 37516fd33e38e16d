"""How a compact plan reaches accelerators: rows are read into host memory, window by window, and copied from there.

No object is made for an item. Tensors come this way that fit into a window, and that are filled as a whole from what
has their dtype; others go by their items. It runs in the thread that loads.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterator, Sequence
from types import TracebackType

import torch
from torch import Tensor

from dcpring import _C
from dcpring.base.masks import mask_of
from dcpring.base.memory import NOTHING, is_dense, is_lazy_view
from dcpring.base.windows import windows
from dcpring.move import device
from dcpring.move.device import Uploader, on_accelerator, padded
from dcpring.torchside.tensors import PLAIN_TYPES


class Landing:
    """The items of a match that come through windows.

    Args:
        targets: what each wanted row is filled into.

    Attributes:
        mask: 1 for each item that comes this way.
        tensors: where the core reads them to, by wanted row, until the ``with`` is left.
        uploader: has the windows.
    """

    def __init__(self, match: _C.Match, storage: _C.StorageIndex, targets: Sequence[Tensor]) -> None:
        self._targets = targets
        self._positions = _positions(match, _landable(targets))
        stored = array.array("I", match.stored_rows())
        rows = sorted(self._positions, key=lambda row: _place(storage, stored[self._positions[row][0]]))
        self.uploader = Uploader([targets[row] for row in rows], sum(map(self._room, rows)))
        hosts = [NOTHING] * len(targets)
        self._windows = list(windows(rows, self._room, self.uploader.window_bytes))
        for number, window in enumerate(self._windows):
            self.uploader.turn(number)
            shapes = ((tuple(targets[row].shape), targets[row].dtype) for row in window)
            for row, host in zip(window, self.uploader.take(number, shapes), strict=True):
                hosts[row] = host
        self._hosts = hosts
        self.tensors = _C.Tensors(hosts)
        straight = _C.straight(match, storage, self.tensors)
        # Of what comes in part, the rest would stay what it was in the window.
        wholes = (some for some in self._positions.values() if all(straight[at] for at in some))
        self.mask = mask_of(len(match), itertools.chain.from_iterable(wholes))

    def __enter__(self) -> Landing:
        self.uploader.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.uploader.__exit__(kind, error, at)
        self._hosts, self.tensors = [], _C.Tensors([])

    def windows(self) -> Iterator[tuple[int, list[int], list[tuple[Tensor, Tensor]]]]:
        """The number of each window, whose memory may be read into; its items; and what is copied then."""
        for number, window in enumerate(self._windows):
            rows = [row for row in window if self.mask[self._positions[row][0]]]
            if rows:
                self.uploader.turn(number)
                pairs = [(self._targets[row], self._hosts[row]) for row in rows]
                yield number, [at for row in rows for at in self._positions[row]], pairs

    def _room(self, row: int) -> int:
        return padded(self._targets[row].nbytes)


def _landable(targets: Sequence[Tensor]) -> set[int]:
    most_bytes = device.HOST_BYTES // device.WINDOWS
    return {
        row
        for row, target in enumerate(targets)
        if on_accelerator(target)
        and type(target) in PLAIN_TYPES
        and target.layout == torch.strided
        and padded(target.nbytes) <= most_bytes
        and not is_lazy_view(target)
        and is_dense(target)
    }


def _positions(match: _C.Match, rows: set[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for position, row in enumerate(array.array("I", match.wanted_rows())):
        if row in rows:
            found.setdefault(row, []).append(position)
    return found


def _place(storage: _C.StorageIndex, row: int) -> tuple[str, int]:
    """So that windows follow the files."""
    place = storage.get(row)
    return ("", 0) if place is None else (place[0], place[2])
