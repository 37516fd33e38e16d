"""A model's weights as the directory of safetensors that ``from_pretrained`` loads: by itself, or beside a checkpoint.

The export of a Checkpointer lies in the checkpoint's folder, and goes with it. It is written once the checkpoint is
committed, by a commit of its own: a crash before that leaves the checkpoint without it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from dcpring.errors import CheckpointError
from dcpring.hf.configs import write_configs
from dcpring.hf.conversions import conversion_of_save
from dcpring.hf.rearrange import Rearrange, rearranged_by
from dcpring.hf.writer import RingHFWriter
from dcpring.names.key_map import KeyMapLike

Format = Literal["hf"]
"""What a checkpoint can be exported to, and the name of the folder."""


class Export(NamedTuple):
    """The weights of a model, ready to be written.

    Attributes:
        model: the module.
        tensors: its weights, as they are stored.
        writer: writes them.
        unused: the rules that have matched none of them.
    """

    model: nn.Module
    tensors: dict[str, Any]
    writer: RingHFWriter
    unused: list[str]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        state: Mapping[str, Any],
        path: str | os.PathLike[str],
        *,
        key_map: KeyMapLike = None,
        rearrange: Sequence[Rearrange] | None = None,
        **options: Any,
    ) -> Export:
        """Prepares a model's state as transformers stores it; names and rules that are given come before its own.

        Args:
            options: of ``RingHFWriter``.
        """
        known = conversion_of_save(model, state)
        writer = RingHFWriter(path, key_map=known.key_map if key_map is None else key_map, **options)
        rules = known.rules if rearrange is None else rearrange
        tensors, unused = rearranged_by(known.state, rules)
        return cls(model, tensors, writer, unused)

    def finish(self) -> None:
        """Puts what else ``save_pretrained`` writes of a model of transformers beside its weights. On one rank."""
        write_configs(self.model, Path(self.writer.path), self.writer.dtype_in_files(self.tensors))


def checked(export: Any, models: Mapping[str, nn.Module], components: Iterable[str]) -> None:
    """Raises ValueError for what cannot be asked for, CheckpointError where none of the components is a model."""
    if export not in (None, "hf"):
        raise ValueError(f'export={export!r}: must be "hf" or None')
    if export is not None and not models:
        raise CheckpointError(f"export={export!r}: no component is a model; there are {', '.join(components)}")


def exports_of(
    models: Mapping[str, nn.Module], state: Mapping[str, Any], folder: Path, options: Mapping[str, Any]
) -> list[Export]:
    """Prepares the export of each model in a state that a Checkpointer has collected. Several have a folder each."""
    found = []
    for name, model in models.items():
        tensors = {key: value for key, value in state[name].items() if isinstance(value, Tensor)}
        path = folder / "hf" if len(models) == 1 else folder / "hf" / name
        found.append(Export.of(model, tensors, path, **options))
    return found


def remove(folder: Path) -> None:
    """Removes the export of a checkpoint that another has replaced."""
    shutil.rmtree(folder / "hf", ignore_errors=True)
