"""Fingerprints of what several ranks hold, or may hold, so that ranks which hold different bytes of it are noticed.

Those of large tensors are of a sample. A tensor that is spread over some of the ranks only has one too: other ranks may
have spread another of the same name over theirs.
"""

from __future__ import annotations

import array
import io
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dcpring import _C
from dcpring.base.groups import world_size
from dcpring.base.memory import is_freed
from dcpring.base.samples import sample_view
from dcpring.base.values import digest
from dcpring.base.windows import windows
from dcpring.errors import CheckpointError
from dcpring.format.ledger import key_of
from dcpring.plan.messages import LocalMessage
from dcpring.plan.placements import is_replicated
from dcpring.torchside.accelerators import is_accelerator
from dcpring.torchside.dcp import plans_for_itself
from dcpring.torchside.groups import members_of_caller
from dcpring.torchside.tensors import is_whole, local_tensor

MAX_BYTES = 64 << 10
"""Of larger tensors a sample is compared: all of them would cost a pass over the model."""

_KEY = key_of(b"replicas")

_WINDOW_BYTES = 8 << 20
"""So many bytes are copied at a time: there may be many small tensors."""

_MOST_NAMED = 10
"""Keys that one warning about differing replicas names."""

_MOST_LOOKED_AT = 1000
"""Chunks that are looked at for parts of different tensors."""

_STAGES = (
    "Stages of a pipeline keep the names that their layers have in the whole model: cut them out of it, or give each "
    "its own prefix"
)
_MEMBERS_OF_GROUP = re.compile(r"(.*\.)?param_groups\.\d+\.params|(.*\.)?param_groups")


def is_hashed(value: Any) -> bool:
    """Whether a value of a state dict is an object, or a tensor that other ranks hold too, or may have another of."""
    if isinstance(value, DTensor):
        local = local_tensor(value)
        return (is_replicated(value) or not _spans(value.device_mesh)) and is_whole(local) and _is_compared(local)
    if is_whole(value):
        return not value.is_meta and value.layout == torch.strided and _is_compared(value)
    return not isinstance(value, Tensor) and not plans_for_itself(value)


def _is_compared(tensor: Tensor) -> bool:
    """Whether a tensor is small, or such that a sample can be had of it without a copy; and has its memory."""
    if is_freed(tensor):
        return False
    if tensor.nbytes <= MAX_BYTES:
        return True
    is_plain = not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    return is_plain and tensor.is_contiguous() and tensor.device.type != "meta"


def _spans(mesh: DeviceMesh) -> bool:
    """Whether a mesh has all ranks."""
    return mesh.size() >= world_size()


def partial_meshes(values: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each mesh, of those that have not all, that tensors are spread over."""
    meshes = {id(value.device_mesh): value.device_mesh for value in values if isinstance(value, DTensor)}
    return tuple({tuple(mesh.mesh.flatten().tolist()) for mesh in meshes.values() if not _spans(mesh)})


def fingerprints(values: list[Any]) -> bytes:
    """A uint32 for each value that ``is_hashed``."""
    local = [local_tensor(value) if isinstance(value, DTensor) else value for value in values]
    tensors = [index for index, value in enumerate(local) if isinstance(value, Tensor)]
    small = [index for index in tensors if local[index].nbytes <= MAX_BYTES]
    large = [index for index in tensors if local[index].nbytes > MAX_BYTES]
    found = dict(zip(small, _tensor_crcs([local[index] for index in small]), strict=True))
    found |= zip(large, _samples([local[index] for index in large]), strict=True)
    return array.array("I", [found[i] if i in found else _object_crc(local[i]) for i in range(len(local))]).tobytes()


def _samples(tensors: list[Tensor]) -> list[int]:
    """Of some stretches of each tensor, the same wherever it lies."""
    sampled = list(tensors)
    for chosen in _by_device(tensors):
        if not is_accelerator(tensors[chosen[0]].device):
            continue
        here = torch.stack([sample_view(tensors[index]) for index in chosen]).cpu()
        for index, sample in zip(chosen, here, strict=True):
            sampled[index] = sample
    known = _C.Tensors(sampled)
    if any(known.kinds()):  # dtypes that the core does not know
        known = _C.Tensors([tensor.detach().view(-1).view(torch.uint8) for tensor in sampled])
    return [sample & 0xFFFFFFFF for sample in memoryview(_C.samples(known, _KEY)).cast("Q")] if sampled else []


def _by_device(tensors: list[Tensor]) -> Iterable[list[int]]:
    found: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        found.setdefault(tensor.device, []).append(index)
    return found.values()


def _object_crc(value: Any) -> int:
    return int.from_bytes(digest(value)[:4], "little")


def _tensor_crcs(tensors: list[Tensor]) -> list[int]:
    """Of the elements' bytes. Tensors of accelerators are brought over in windows, each in one transfer."""
    crcs = [0] * len(tensors)
    for chosen in _by_device(tensors):
        for window in windows(chosen, lambda index: tensors[index].nbytes, _WINDOW_BYTES):
            with torch.no_grad():
                here = _brought_here([tensors[index].detach() for index in window])
            for index, tensor, crc in zip(window, here, _C.Tensors(here).crcs(), strict=True):
                crcs[index] = _crc_of(tensor) if crc is None else crc
    return crcs


def _crc_of(tensor: Tensor) -> int:
    """Of a tensor whose dtype the core does not know."""
    if not tensor.is_quantized and tensor.dtype != torch.uint8:
        return _tensor_crcs([tensor.view(-1).view(torch.uint8)])[0]
    out = io.BytesIO()
    torch.save(tensor, out)
    return zlib.crc32(out.getbuffer())


def _brought_here(tensors: list[Tensor]) -> list[Tensor]:
    """Contiguous tensors of the same bytes in host memory. They are all of one device."""
    tensors = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    if not is_accelerator(tensors[0].device):
        return tensors
    if any(tensor.is_quantized for tensor in tensors):  # their bytes are not to be had
        return [tensor.cpu() for tensor in tensors]
    parts = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
    return list(torch.cat(parts).cpu().split([part.numel() for part in parts]))


# ---- comparing ----


def differences(merge: _C.Merge, messages: Sequence[LocalMessage]) -> str:
    """What is to be said of ranks that hold different bytes of one chunk, in order of the plans; "" of none.

    Raises:
        CheckpointError: where they hold different tensors under one name, of each of which a part would be saved.
    """
    count, found = merge.differing(_MOST_LOOKED_AT if any(message.meshes for message in messages) else _MOST_NAMED)
    if not count:
        return ""
    differing = [(name, _by_fingerprint(fingerprints)) for name, fingerprints in found]
    apart = [one for one in differing if _are_apart(one[1], messages)]
    if apart:
        raise CheckpointError(
            "ranks whose meshes have nothing in common hold different tensors under one name, and parts of both "
            f"would be saved: {_described(apart, messages, len(apart))}. {_STAGES}"
        )
    return (
        "ranks hold different bytes of what should be replicated, and only one rank's are saved: "
        f"{_described(differing, messages, count)}. {_cure_of(differing)}"
    )


def _by_fingerprint(fingerprints: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The holders of a chunk, by their place among the plans, in groups that have the same bytes of it."""
    by_fingerprint: dict[int, list[int]] = {}
    for place, value in fingerprints:
        if value:  # else nothing was compared there
            by_fingerprint.setdefault(value, []).append(place)
    return list(by_fingerprint.values())


def _are_apart(different: list[list[int]], messages: Sequence[LocalMessage]) -> bool:
    """Whether ranks with different bytes of a chunk have spread it over meshes of their own."""
    reach = [set().union(*(messages[place].meshes for place in places)) for places in different]
    if not all(reach):
        return False
    members = dict(enumerate(members_of_caller()))
    ranks = [{members.get(place, place) for place in places} for places in different]
    return any(
        not any(ranks[other] & set(mesh) for mesh in reach[one])
        for one in range(len(different))
        for other in range(one + 1, len(different))
    )


def _described(differing: list[tuple[str, list[list[int]]]], messages: Sequence[LocalMessage], count: int) -> str:
    by_name: dict[str, list[str]] = {}
    for name, (first, *others) in differing:
        if name not in by_name and len(by_name) == _MOST_NAMED:
            break
        places = sorted(place for places in others for place in places)
        ranks = [str(messages[place].rank) for place in places]
        shown = ", ".join(ranks[:8]) + (", ..." if len(ranks) > 8 else "")
        by_name.setdefault(name, []).append(f"rank {messages[first[0]].rank} differs from {shown}")
    chunks = sum(map(len, by_name.values()))
    more = f"; and {count - chunks} more" if count > chunks else ""
    return "; ".join(f"{name!r} ({'; '.join(texts)})" for name, texts in by_name.items()) + more


def _cure_of(differing: list[tuple[str, list[list[int]]]]) -> str:
    if any(_MEMBERS_OF_GROUP.fullmatch(name) for name, _ in differing):
        return (
            "Of a pipeline's optimizers, which have the parameters of their stages, save "
            "get_optimizer_state_dict(..., options=StateDictOptions(flatten_optimizer_state_dict=True)), or no load "
            "will find the groups of the others; a Checkpointer joins them"
        )
    return f'Give each rank a key of its own, or pass check_replicas="off" if the difference does not matter. {_STAGES}'
