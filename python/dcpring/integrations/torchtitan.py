"""torchtitan: a checkpoint manager whose checkpoints go through dcpring, and a data loader that resumes elastically.

    from dcpring.integrations.torchtitan import RingCheckpointManager

    def my_training() -> Trainer.Config:
        return Trainer.Config(..., checkpoint=RingCheckpointManager.Config(enable=True, interval=500))

All else is torchtitan's: its options, folders, retention, async modes, seed checkpoints and the Hugging Face export.
Either manager resumes from what the other has saved.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.utils.data import DataLoader, Dataset, default_collate
from torchtitan.components.checkpointer.dcp import MODEL, AsyncMode, CheckpointManager
from torchtitan.tools import filesystem
from torchtitan.tools.utils import GarbageCollection

from dcpring.plan.load_planner import RingLoadPlanner
from dcpring.plan.save_planner import RingSavePlanner
from dcpring.resume.data import ElasticLoader, ElasticSampler
from dcpring.store.reader import RingReader
from dcpring.store.writer import RingWriter

try:
    from torchtitan.components.dataloader import BaseDataLoader
except ModuleNotFoundError:  # from August 2026 on
    from torchtitan.components.data.loader import BaseDataLoader

__all__ = ["ElasticDataLoader", "RingCheckpointManager"]


class RingCheckpointManager(CheckpointManager):
    """torchtitan's ``CheckpointManager`` on ``RingWriter`` and ``RingReader``, with dcpring's planners.

    Safetensors of Hugging Face (``last_save_in_hf``, ``initial_load_in_hf``) and remote folders go torchtitan's way.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """Names ``RingCheckpointManager`` in a training's configuration. The fields are torchtitan's."""

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | AsyncSaveResponse | None:
        """Saves ``state_dict`` into the folder ``checkpoint_id``; returns what ``dcp.async_save`` does."""
        if to_hf or filesystem.is_remote(checkpoint_id):
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        writer, planner = RingWriter(checkpoint_id), RingSavePlanner()
        ring: dict[str, Any] = {"checkpoint_id": checkpoint_id, "storage_writer": writer, "planner": planner}
        result = None
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, **ring)
        else:
            if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
                ring |= {"async_checkpointer_type": AsyncCheckpointerType.PROCESS, "async_stager": self.stager}
            result = dcp.async_save(state_dict, process_group=self.pg, **ring)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return result

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Loads the folder ``checkpoint_id`` into ``state_dict``, and the model from it."""
        if from_hf or filesystem.is_remote(checkpoint_id):
            return super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        reader, planner = RingReader(checkpoint_id), RingLoadPlanner()
        dcp.load(state_dict, checkpoint_id=checkpoint_id, storage_reader=reader, planner=planner)
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)


class ElasticDataLoader(BaseDataLoader):
    """A data loader for torchtitan that goes on with any number of ranks: every sample of an epoch is used once.

    torchtitan's own loaders keep a position for each rank, and refuse another data-parallel degree. The progress of
    this one belongs to no rank. A subclass says what the samples are, and has a ``Config`` of its own.
    Where torchtitan counts a batch in tokens, that is as many samples as have them, one after the other::

        class Loader(ElasticDataLoader):
            @dataclass(kw_only=True, slots=True)
            class Config(ElasticDataLoader.Config):
                path: str

            def samples(self, config, *, tokenizer, seq_len, **_):
                return PackedTokens(config.path, seq_len)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        seed: int = 0
        """Seed of the order of samples."""

        shuffle: bool = True
        """Whether each epoch has an order of its own; else samples come as the dataset has them."""

        infinite: bool = True
        """Whether another epoch follows the first."""

        num_workers: int = 0
        """Number of processes that load samples."""

        pin_memory: bool = False
        """Whether batches are copied to pinned memory."""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int | None = None, **kwargs: Any
    ) -> None:
        collate = default_collate
        if local_batch_size is None:  # from August 2026 on
            kwargs["seq_len"], collate = kwargs["max_context_length"], _in_a_row
            tokens, seq_len = kwargs["num_tokens_per_batch"], kwargs["seq_len"]
            local_batch_size = tokens // seq_len
            if tokens % seq_len:
                raise ValueError(
                    f"a batch of {tokens} tokens is no number of samples of {seq_len}; make "
                    "num_tokens_per_microbatch_per_dp_rank a multiple of max_context_length"
                )
        dataset = self.samples(config, **kwargs)
        sampler = ElasticSampler(
            len(dataset),  # type: ignore[arg-type]
            seed=config.seed,
            shuffle=config.shuffle,
            remainder="drop",
            rank=dp_rank,
            world_size=dp_world_size,
        )
        if sampler.most(0) < local_batch_size:
            raise ValueError(
                f"{len(dataset)} samples are fewer than a batch of {local_batch_size} for each of {dp_world_size} "  # type: ignore[arg-type]
                "ranks; use more samples or a smaller training.local_batch_size"
            )
        self.infinite = config.infinite
        self.loader = ElasticLoader(
            DataLoader(
                dataset,
                batch_size=local_batch_size,
                sampler=sampler,
                collate_fn=collate,
                num_workers=config.num_workers,
                pin_memory=config.pin_memory,
            )
        )

    @abstractmethod
    def samples(self, config: Any, **kwargs: Any) -> Dataset[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """The dataset, map-style: inputs and labels of each sample, int64 tensors of ``seq_len`` tokens.

        Args:
            config: this loader's configuration.
            **kwargs: what else torchtitan gives a loader: ``tokenizer`` and more, and always ``seq_len``.
        """

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        yield from self.loader
        while self.infinite:
            yield from self.loader

    def state_dict(self) -> dict[str, Any]:
        """The progress, the same on all ranks: torchtitan's loop gives each of them as many batches."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there, on any number of ranks."""
        self.loader.load_state_dict(state_dict)


def _in_a_row(samples: list[Any]) -> Any:
    """A batch without a dimension of its own."""
    inputs, labels = default_collate(samples)
    return {name: one.flatten(0, 1) for name, one in inputs.items()}, labels.flatten(0, 1)
