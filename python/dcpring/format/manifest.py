"""What a Checkpointer notes in a checkpoint: JSON under the key ``dcpring``, an ordinary string to DCP."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from dcpring.base import strict_json
from dcpring.errors import CorruptCheckpointError

MANIFEST_KEY = "dcpring"
MANIFEST_VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """What a Checkpointer notes in the checkpoint.

    Attributes:
        step: of the training.
        world_size: ranks that saved.
        components: by name: ``kind``, ``type``, and what that kind has to say (``meshes``, ``world_size``, ...).
        version: of this format.
    """

    step: int
    world_size: int
    components: dict[str, dict[str, Any]] = field(default_factory=dict)
    version: int = MANIFEST_VERSION

    def dump(self) -> str:
        return json.dumps(vars(self), sort_keys=True)

    @staticmethod
    def parse(text: Any, path: str) -> Manifest:
        try:
            manifest = Manifest(**strict_json.loads(text))
        except (TypeError, ValueError) as error:
            raise CorruptCheckpointError(f"the manifest (key {MANIFEST_KEY!r}) is damaged: {error}", path) from error
        if manifest.version != MANIFEST_VERSION:
            raise CorruptCheckpointError(
                f"the manifest has version {manifest.version}, this dcpring knows {MANIFEST_VERSION}", path
            )
        components = manifest.components if isinstance(manifest.components, dict) else {"": None}
        kinds = [isinstance(entry, dict) and entry.get("kind") for entry in components.values()]
        if not isinstance(manifest.world_size, int) or manifest.world_size < 1 or not all(kinds):
            raise CorruptCheckpointError(f"the manifest (key {MANIFEST_KEY!r}) contradicts itself: {text}", path)
        return manifest
