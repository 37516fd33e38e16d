"""transformers: a callback that saves a whole training of its ``Trainer`` with ``Checkpointer``, and resumes it.

    saving = RingCheckpoint("ckpt", every_n_steps=500)
    saving.train(trainer)                                                        # where it was trainer.train()

The Trainer resumes by a checkpoint of its own kind, and by nothing else. So it is given one that has its state, by
which it finds its place in the data, and no weights; these and all else come from ours once training begins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from dcpring.resume.checkpointer import Checkpointer, try_options
from dcpring.resume.components import Member
from dcpring.resume.reports import ResumeReport
from dcpring.resume.rng import RNG
from dcpring.resume.whole import Replicated

__all__ = ["RingCheckpoint"]


class RingCheckpoint(TrainerCallback):
    """Saves all of a training every so many steps, and at its end: ``train`` goes on from the last of these.

    That is model, optimizer, scheduler, gradient scaler, random states, and the state of the Trainer and of its
    callbacks. Under DDP, FSDP and on one device: each rank writes its part, in the background, and any number of
    processes resumes. Takes the place of ``save_strategy`` and ``resume_from_checkpoint``. The folder is that of a
    ``Checkpointer``.

    Args:
        folder: of all checkpoints.
        every_n_steps: a checkpoint is saved when this many optimizer steps were taken, and at the end.
        components: more objects with a state, by name.
        exclude: components that are not loaded, such as those that a checkpoint does not have.
        blocking: whether training waits until a checkpoint is complete.
        **options: options of ``Checkpointer``, such as ``keep_last``.

    Attributes:
        checkpointer: None outside of ``train``.
        report: what the last ``train`` began with; None if that was no checkpoint.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every_n_steps: int,
        components: Mapping[str, Any] | None = None,
        exclude: Sequence[str] = (),
        blocking: bool = False,
        **options: Any,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps}: must be at least 1")
        try_options(options, "RingCheckpoint()")
        self.folder, self.every_n_steps, self.blocking = folder, every_n_steps, blocking
        self.components, self.exclude, self.options = dict(components or {}), tuple(exclude), options
        self.checkpointer: Checkpointer | None = None
        self.report: ResumeReport | None = None
        self._trainer: Trainer | None = None
        self._step: int | None = None
        self._saved = 0
        self._rng, self._rng_state = RNG(), dict[str, Any]()

    def train(self, trainer: Trainer, **options: Any) -> Any:
        """Is ``trainer.train(**options)``, from the last checkpoint on if there is one. All ranks call it.

        Raises:
            ValueError: the Trainer cannot be resumed in this way.
        """
        if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and hasattr(trainer.model, "peft_config")):
            raise ValueError(
                "RingCheckpoint does not resume DeepSpeed, nor adapters of peft under FSDP; leave DeepSpeed to the "
                "Trainer's own checkpoints, and use dcpring.install() with FSDP's SHARDED_STATE_DICT"
            )
        found = {"json": ""}
        with Checkpointer(self.folder, {_STATE: Replicated(found)}, **self.options) as checkpointer:
            self._step = checkpointer.load(components=[_STATE], missing_ok=True).step
        self._trainer, self.report = trainer, None
        with contextlib.ExitStack() as stack:
            if self._step is not None:
                options["resume_from_checkpoint"] = stack.enter_context(tempfile.TemporaryDirectory())
                _write_place(Path(options["resume_from_checkpoint"]), found["json"], trainer.model)
            trainer.pop_callback(self)  # where it was among the Trainer's callbacks before
            trainer.add_callback(self)
            stack.callback(trainer.pop_callback, self)
            stack.push(self._close)
            return trainer.train(**options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Loads the checkpoint, if there is one."""
        trainer = self._trainer
        if trainer is None:
            raise ValueError("call RingCheckpoint.train(trainer) in place of trainer.train()")
        scheduler = kwargs["lr_scheduler"]
        components = {
            "model": kwargs["model"],
            "optimizer": kwargs["optimizer"],
            "scheduler": getattr(scheduler, "scheduler", scheduler),  # accelerate's holds torch's
            "rng": self._rng,
            _STATE: _TrainerState(trainer),
        }
        if trainer.accelerator.scaler is not None:
            components["scaler"] = Replicated(trainer.accelerator.scaler)
        self.checkpointer = Checkpointer(self.folder, components | self.components, **self.options)
        if self._step is not None:
            self.report = self.checkpointer.load(self._step, exclude=(_STATE, *self.exclude))
            self._rng_state = self._rng.state_dict()
        self._saved = state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Saves what the step before has left, with what was found when it was evaluated."""
        if self._rng_state:  # what the loader has drawn since belongs to its way to this step
            self._rng.load_state_dict(self._rng_state)
            self._rng_state = {}
        if state.global_step // self.every_n_steps > self._saved // self.every_n_steps:
            self._save(state.global_step, self.blocking)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Saves the last step, unless the best model has taken the place of its own."""
        if state.global_step != self._saved and not args.load_best_model_at_end:
            self._save(state.global_step, True)

    def _save(self, step: int, blocking: bool) -> None:
        assert self.checkpointer is not None and self._trainer is not None
        self._trainer.store_flos()
        self.checkpointer.save(step, blocking=blocking)
        self._saved = step

    def _close(self, *error: Any) -> None:
        """Waits for a save in the background; what has ended the training is not hidden by what that says."""
        checkpointer, self.checkpointer, self._trainer = self.checkpointer, None, None
        if checkpointer is not None:
            checkpointer.__exit__(*error)


_STATE = "trainer"


class _TrainerState(Replicated):
    """What the Trainer writes into its ``trainer_state.json``. It is rank 0's: others have other clocks."""

    def collect(self, member: Member) -> tuple[dict[str, str], str]:
        trainer = self.stateful
        callbacks = [one for one in (*trainer.callback_handler.callbacks, trainer.control) if _has_state(one)]
        state = dataclasses.replace(trainer.state, stateful_callbacks=callbacks)
        return {"json": json.dumps(dataclasses.asdict(state))}, ""


def _has_state(callback: Any) -> bool:
    return isinstance(callback, ExportableState)


def _write_place(folder: Path, state: str, model: nn.Module) -> None:
    """Makes a checkpoint of the Trainer's kind without weights: of those that its index names it misses none."""
    (folder / "trainer_state.json").write_text(state)
    weights = model.state_dict()
    if hasattr(model, "peft_config"):  # for which it reads no index; these take no room, whatever their shapes
        blank = {name: torch.zeros((), dtype=one.dtype).expand(one.shape) for name, one in weights.items()}
        torch.save(blank, folder / "pytorch_model.bin")
        return
    index = {"weight_map": dict.fromkeys(weights, "none.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "none.safetensors").write_bytes(_NO_TENSORS)


_NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
