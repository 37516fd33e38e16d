"""Which metadata of a directory may be loaded, where saves with ``use_collectives=False`` have written there.

Such a save leaves a metadata file for each rank, beside or instead of the one of all ranks. Files of different saves
do not make a checkpoint, and what a later save has superseded is not loaded.
"""

from __future__ import annotations

from pathlib import Path

from dcpring.base.text import ranges
from dcpring.errors import CheckpointError
from dcpring.format.metadata import METADATA_NAME, Trailer, metadata_id, read_trailer
from dcpring.store import layout


def _trailers(directory: Path) -> dict[int, Trailer]:
    files = layout.rank_metadata_files(directory) if directory.is_dir() else {}
    trailers = ((rank, read_trailer(path)) for rank, path in files.items())
    return {rank: trailer for rank, trailer in trailers if trailer is not None}


def refuse_stale(directory: Path) -> None:
    """A global metadata file that a later save with ``use_collectives=False`` has superseded is not loaded."""
    path = directory / METADATA_NAME
    if not path.exists():
        return
    trailers = _trailers(directory)
    if not trailers:
        return
    own_id = metadata_id(path)
    newer = sorted(rank for rank, trailer in trailers.items() if trailer.superseded_id == own_id)
    if newer:
        raise CheckpointError(
            f"{path} is older than the metadata that ranks {ranges(newer)} saved with use_collectives=False; "
            f"remove {path} to load theirs, or their __*.metadata to load it"
        )


def refuse_superseded(directory: Path, rank: int) -> None:
    """DCP turns to rank-local metadata whenever the global one fails to load: it may be that of an older save."""
    path = directory / METADATA_NAME
    if not path.exists():
        return
    own = _trailers(directory).get(rank)
    if own is not None and own.superseded_id != metadata_id(path):
        raise CheckpointError(
            f"the metadata of rank {rank} in {directory} is older than {path}, which cannot be loaded; "
            f"remove {path} to load what is older"
        )


def refuse_mixed(directory: Path, rank: int) -> None:
    """Rank-local metadata of different saves do not make a checkpoint."""
    trailers = _trailers(directory)
    own = trailers.get(rank)
    if own is None:
        return
    missing = [r for r in range(own.world_size) if r not in trailers]
    mixed = [r for r, t in trailers.items() if r < own.world_size and _save_of(t) != _save_of(own)]
    if missing or mixed:
        problem = f"ranks {ranges(missing)} have none" if missing else f"ranks {ranges(sorted(mixed))} differ"
        raise CheckpointError(
            f"the rank-local metadata in {directory} are not of one save of {own.world_size} ranks: {problem}; "
            "a save with use_collectives=False was interrupted. Load an earlier checkpoint"
        )


def _save_of(trailer: Trailer) -> tuple[int, str]:
    return trailer.world_size, trailer.group_id
