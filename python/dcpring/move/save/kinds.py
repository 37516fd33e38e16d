"""How the core can take each tensor of a list."""

from __future__ import annotations

from torch import Tensor

from dcpring import _C
from dcpring.base.memory import NOTHING, is_freed, lazy_views
from dcpring.torchside.tensors import PLAIN_TYPES

PLAIN, DEVICE, OTHER, LAZY = 0, 1, 2, 3


def handles_and_kinds(tensors: list[Tensor]) -> tuple[_C.Tensors, bytes]:
    """The tensors for the core, and how each can be taken: as it lies in memory, through a copy from its device, only
    by torch.save, or once it has been made what it stands for: a conjugate or negative view in CPU memory.
    """
    lazy = [index for index in lazy_views(tensors) if tensors[index].device.type == "cpu"]
    strange = {index: OTHER if is_freed(tensors[index]) else LAZY for index in lazy}
    strange.update((index, OTHER) for index, tensor in enumerate(tensors) if type(tensor) not in PLAIN_TYPES)
    if not strange:
        handles = _C.Tensors(tensors)
        return handles, handles.kinds()
    handles = _C.Tensors([NOTHING if index in strange else tensor for index, tensor in enumerate(tensors)])
    kinds = bytearray(handles.kinds())
    for index, kind in strange.items():
        kinds[index] = kind
    return handles, bytes(kinds)
