"""A model's weights beside a checkpoint of a Checkpointer: the directory of safetensors that ``from_pretrained`` loads.

It lies in the checkpoint's folder, and goes with it. It is written once the checkpoint is committed, by a commit of its
own: a crash before that leaves the checkpoint without it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from dcpring.errors import CheckpointError
from dcpring.hf.configs import write_configs
from dcpring.hf.conversions import conversion_of_save
from dcpring.hf.rearrange import rearranged_by
from dcpring.hf.writer import RingHFWriter

Format = Literal["hf"]
"""What a checkpoint can be exported to, and the name of the folder."""


class Export(NamedTuple):
    """What is written.

    Attributes:
        model: the module.
        tensors: its weights, as they are stored.
        writer: that writes them.
    """

    model: nn.Module
    tensors: dict[str, Any]
    writer: RingHFWriter

    @property
    def path(self) -> Path:
        return Path(self.writer.path)

    def finish(self) -> None:
        """Puts what else ``save_pretrained`` writes of a model of transformers beside its weights. On one rank."""
        write_configs(self.model, self.path, self.writer.dtype_in_files(self.tensors))


def checked(export: Any, models: Mapping[str, nn.Module], components: Iterable[str]) -> None:
    """Raises ValueError for what cannot be asked for, CheckpointError where none of the components is a model."""
    if export not in (None, "hf"):
        raise ValueError(f'export={export!r}: must be "hf" or None')
    if export is not None and not models:
        raise CheckpointError(f"export={export!r}: no component is a model; there are {', '.join(components)}")


def exports_of(
    models: Mapping[str, nn.Module], state: Mapping[str, Any], folder: Path, options: Mapping[str, Any]
) -> list[Export]:
    """What is exported of a state that a Checkpointer has collected: each model; of several each has a folder."""
    found = []
    for name, model in models.items():
        tensors = {key: value for key, value in state[name].items() if isinstance(value, Tensor)}
        known = conversion_of_save(model, tensors)
        path = folder / "hf" if len(models) == 1 else folder / "hf" / name
        writer = RingHFWriter(path, **{"key_map": known.key_map, **options})
        found.append(Export(model, rearranged_by(known.in_order(tensors), known.rules)[0], writer))
    return found


def remove(folder: Path) -> None:
    """Removes the export of a checkpoint that another has replaced."""
    shutil.rmtree(folder / "hf", ignore_errors=True)
