"""Lightning: a ``CheckpointIO`` on dcpring's storage, and a callback that saves a whole training with ``Checkpointer``.

    trainer = Trainer(strategy="ddp", plugins=RingCheckpointIO())             # DDP, one device; Fabric(plugins=...) too
    trainer = Trainer(strategy=..., callbacks=RingCheckpoint("ckpt", every_n_steps=500))              # any strategy

The strategies that save shards (FSDP, ModelParallel) have no place for a plugin: ``dcpring.install()`` serves them.
"""

from __future__ import annotations

import copy
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dcpring.base.arguments import strings
from dcpring.errors import CheckpointError, UntrustedCheckpointError
from dcpring.move.objects import ObjectPolicy
from dcpring.resume import trees
from dcpring.resume.checkpointer import Checkpointer, try_options
from dcpring.resume.components import Component, Member, Remarks, differences
from dcpring.resume.data import ElasticLoader
from dcpring.resume.reports import ResumeReport
from dcpring.resume.rng import RNG
from dcpring.resume.whole import Replicated
from dcpring.store.layout import not_remote
from dcpring.store.writer import RingWriter
from dcpring.tree import load, save

try:
    from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
    from lightning.fabric.utilities.cloud_io import get_filesystem
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.utilities import CombinedLoader
except ModuleNotFoundError:
    from lightning_fabric.plugins.io import CheckpointIO, TorchCheckpointIO
    from lightning_fabric.utilities.cloud_io import get_filesystem
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.callbacks import Checkpoint
    from pytorch_lightning.utilities import CombinedLoader

__all__ = ["RingCheckpoint", "RingCheckpointIO"]

logger = logging.getLogger("dcpring")


class RingCheckpointIO(CheckpointIO):
    """Saves what Lightning puts into a checkpoint as a directory of DCP, exactly: loads give the same tree.

    For strategies whose rank 0 saves everything: DDP and one device. ``AsyncCheckpointIO(RingCheckpointIO())`` saves
    in the background. Files that ``Trainer`` saved without this plugin load as before.

    Args:
        objects: what to do about objects that a load refuses unless it is told ``weights_only=False``: "warn", "error"
            or "allow".
        safe_globals: classes that objects may have besides, at saves and loads.
        **options: further options of ``RingWriter``, such as ``queue_depth``.
    """

    def __init__(self, *, objects: ObjectPolicy = "warn", safe_globals: Sequence[Any] = (), **options: Any) -> None:
        self.safe_globals = tuple(safe_globals)
        self.options = {"objects": objects, "safe_globals": self.safe_globals, **options}
        RingWriter(os.curdir, **self.options)  # refuses what is wrong with them now, and not at the first save

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Saves a checkpoint into the folder ``path``. What was there before stays until the new one is complete."""
        if storage_options is not None:
            raise TypeError("RingCheckpointIO takes no storage_options; give options of RingWriter to it instead")
        _refuse_remote(path, "ModelCheckpoint without RingCheckpointIO")
        # A file is another plugin's, and a link shows another checkpoint: a folder cannot be renamed over either.
        is_in_the_way = os.path.isfile(path) or os.path.islink(path)
        target = f"{os.fspath(path)}.new" if is_in_the_way else path
        save.write(checkpoint, target, self.options, f"{_UNSAFE}, or with {_SAFE_GLOBALS}", "RingCheckpointIO")
        if is_in_the_way:
            os.unlink(path)
            os.rename(target, path)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads the folder ``path``, into host memory; a file, or what is remote, is ``TorchCheckpointIO``'s.

        Args:
            path: what ``save_checkpoint`` was given.
            map_location: taken for files only: Lightning copies what is loaded into the objects of the training.
            weights_only: False trusts the checkpoint: its objects may run any code.
        """
        if os.path.isfile(path) or not_remote(path):
            return TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
        try:
            return load.load(path, trusted=weights_only is False, safe_globals=self.safe_globals)
        except UntrustedCheckpointError as error:
            cure = f"pass {_UNSAFE}, or its class to {_SAFE_GLOBALS.format('...')}"
            raise UntrustedCheckpointError(error.what, cure) from error

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint, or the file of another plugin."""
        if os.path.islink(path) or os.path.isfile(path):
            os.unlink(path)
        elif os.path.isdir(path):
            shutil.rmtree(path)


_UNSAFE, _SAFE_GLOBALS = "weights_only=False to fit", "RingCheckpointIO(safe_globals=[{}])"


def _refuse_remote(path: str | os.PathLike[str], instead: str) -> None:
    remote = not_remote(path, f"{instead}, which goes through Lightning's own fsspec")
    if remote:
        raise CheckpointError(remote)


class RingCheckpoint(Checkpoint):
    """Saves all of a training every so many steps, and resumes from the last one.

    That is model, optimizers, schedulers, loops, random states, and what callbacks, the precision and the datamodule
    have as ``state_dict()``.

    With any strategy: each rank writes its shards, in the background, and any number of processes resumes. Takes the
    place of ``ModelCheckpoint`` and ``ckpt_path=``. The folder is that of a ``Checkpointer``.

    Args:
        folder: of all checkpoints.
        every_n_steps: a checkpoint is saved when this many optimizer steps were taken, and at the end.
        components: more objects with a state, by name, such as ``{"data": ElasticLoader(...)}``.
        exclude: components that are not loaded, such as those that a checkpoint does not have.
        blocking: whether training waits until a checkpoint is complete.
        **options: options of ``Checkpointer``, such as ``keep_last``.

    Attributes:
        best_model_path: always "": checkpoints are not ranked.
        checkpointer: None outside of ``fit``.
        report: what the last ``fit`` began with.
    """

    best_model_path = ""  # Lightning asks for it, where a test names no model

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every_n_steps: int,
        components: Mapping[str, Any] | None = None,
        exclude: str | Sequence[str] = (),
        blocking: bool = False,
        **options: Any,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps}: must be at least 1")
        try_options(options, "RingCheckpoint()")
        _refuse_remote(folder, "ModelCheckpoint")
        self.folder, self.every_n_steps, self.blocking = Path(folder), every_n_steps, blocking
        self.components, self.exclude, self.options = dict(components or {}), strings(exclude, "exclude"), options
        self.checkpointer: Checkpointer | None = None
        self.report: ResumeReport | None = None
        self._saved = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Loads the latest checkpoint, if there is one."""
        _warn_of_hooks(trainer)
        components: dict[str, Any] = {
            "model": trainer.strategy.model,
            "loops": _Loops(trainer, list(self.components.values())),
            "rng": RNG(),
        }
        components |= {f"optimizer_{i}": optimizer for i, optimizer in enumerate(trainer.optimizers)}
        components |= {f"scheduler_{i}": config.scheduler for i, config in enumerate(trainer.lr_scheduler_configs)}
        self.checkpointer = Checkpointer(self.folder, components | self.components, **self.options)
        self.report = self.checkpointer.load(exclude=self.exclude, missing_ok=True)
        # One that is gone is a tuner's, which has put back by it what it has tried its steps with.
        is_there = trainer.ckpt_path is not None and get_filesystem(trainer.ckpt_path).exists(str(trainer.ckpt_path))
        if self.report.step is not None and is_there:
            raise ValueError(
                f"{self.report.path} was loaded, and ckpt_path={str(trainer.ckpt_path)!r} would be over it; leave "
                "ckpt_path out, or give RingCheckpoint another folder"
            )
        self._saved = trainer.global_step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Brings loops and loaders together where an epoch of one is an epoch of the other."""
        assert self.report is not None
        loaders = CombinedLoader(trainer.train_dataloader).flattened
        _refuse_unused(self.components, loaders)
        for loader in loaders:
            if isinstance(loader, ElasticLoader) and len(loader) == trainer.num_training_batches:
                _bring_together(trainer.fit_loop, loader, self.report.step is None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves where the number of steps asks for it; a batch may take several of them."""
        if trainer.global_step // self.every_n_steps > self._saved // self.every_n_steps:
            self._save(trainer.global_step, self.blocking)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the last step."""
        self._save(trainer.global_step, True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for a save in the background."""
        checkpointer, self.checkpointer = self.checkpointer, None
        assert checkpointer is not None
        checkpointer.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same; what has ended ``fit`` is not hidden by what a save says."""
        checkpointer, self.checkpointer = self.checkpointer, None
        if checkpointer is not None:
            checkpointer.__exit__(type(exception), exception, exception.__traceback__)

    def _save(self, step: int, blocking: bool) -> None:
        # With gradient accumulation several batches end at one step.
        if step != self._saved:
            assert self.checkpointer is not None
            self.checkpointer.save(step, blocking=blocking)
            self._saved = step


_LOADER_CURE = (
    "Trainer(use_distributed_sampler=False) and a sampler that gives each rank its own samples, such as torchdata's "
    "StatefulDistributedSampler"
)


def _stateful(component: Any) -> Any:
    return component.stateful if isinstance(component, Component) else component


def _refuse_unused(components: Mapping[str, Any], loaders: Sequence[Any]) -> None:
    """A component whose place Lightning has given to a loader of its own keeps a state that never changes."""
    for name, component in components.items():
        given = _stateful(component)
        dataset = getattr(given, "dataset", None)
        same = [loader for loader in loaders if dataset is not None and getattr(loader, "dataset", None) is dataset]
        if same and given not in same:
            raise ValueError(
                f"component {name!r} is not the loader that training takes its batches from: Lightning has made "
                f"another one of it, with a sampler of its own. Take {_LOADER_CURE}; or an ElasticLoader"
            )


class _Loops(Replicated):
    """Lightning's loops, and with them what loaders have as a state that are not among the components, and callbacks.

    Loops are alike on all ranks. What callbacks and their like have is rank 0's, as in Lightning's own checkpoints, and
    goes to those that are there when it is loaded.
    """

    cure = f'a loader with a state of each rank goes into components={{"data": PerRank(loader)}}, with {_LOADER_CURE}'

    def __init__(self, trainer: Trainer, components: Sequence[Any]) -> None:
        super().__init__(trainer.fit_loop)
        self._trainer = trainer
        self._others = list(map(_stateful, components))

    def collect(self, member: Member) -> tuple[Any, Any]:
        state = self.stateful.state_dict()
        loaders = CombinedLoader(self._trainer.train_dataloader).flattened
        if all(any(loader is other for other in self._others) for loader in loaders if hasattr(loader, "state_dict")):
            state["state_dict"].pop(_LOADERS, None)
        states = {name: one.state_dict() for name, one in _with_a_state(self._trainer).items()}
        return state | {_CALLBACKS: {name: one for name, one in states.items() if one}}, trees.digest(state)

    def take(self, ready: Any, before: Sequence[Component]) -> Remarks:
        loops = _without_callbacks(ready)
        super().take(loops, before)
        own = {name: value for name, value in loops["state_dict"].items() if name != _LOADERS}
        there = _with_a_state(self._trainer)
        for name, value in ready.get(_CALLBACKS, {}).items():
            if name in there:
                there[name].load_state_dict(copy.deepcopy(value))
        # Lightning keeps the states of loaders until it has made these.
        return lambda: differences(self.stateful.state_dict(), {**loops, "state_dict": own})


def _without_callbacks(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != _CALLBACKS}


def _with_a_state(trainer: Trainer) -> dict[str, Any]:
    """What Lightning asks for a state besides model, optimizers, schedulers and loops, by the names it has for them."""
    more = (trainer.precision_plugin, getattr(trainer, "datamodule", None))
    callbacks: dict[str, Any] = {callback.state_key: callback for callback in trainer.callbacks}
    return callbacks | {type(one).__qualname__: one for one in more if one is not None}


def _warn_of_hooks(trainer: Trainer) -> None:
    """Names those who put into Lightning's own checkpoints what is in none of ours."""
    hooks = {Callback.on_save_checkpoint, LightningModule.on_save_checkpoint}
    objects = [*trainer.callbacks, trainer.lightning_module]
    named = [type(one).__name__ for one in objects if type(one).on_save_checkpoint not in hooks]
    if named:
        logger.warning(
            "RingCheckpoint does not save what on_save_checkpoint of %s adds to checkpoints. Have it in state_dict() "
            "and load_state_dict() of a callback, or in components=",
            " and ".join(named),
        )


_CALLBACKS = "callbacks"
_LOADERS = "combined_loader"


def _bring_together(loops: Any, loader: ElasticLoader, is_new: bool) -> None:
    """Counts the batches that the loader has left, which are others on other ranks, or begins an epoch with it.

    Where nothing was loaded, a ``fit`` that has failed may have left the loader within an epoch. What was saved at the
    end of one would give nothing once more, to a loop that comes by there, as Lightning's do not.
    """
    batches = loops.epoch_loop.batch_progress
    if loops.restarting:
        shift = len(loader) - loader.batches_left - batches.current.processed
        for name in ("ready", "started", "processed", "completed"):
            setattr(batches.current, name, getattr(batches.current, name) + shift)
    elif is_new:
        loader.load_state_dict({"epoch": loader.epoch, "consumed": 0})
    if not loader.batches_left and (batches.is_last_batch or not loops.restarting):
        loader.set_epoch(loader.epoch + 1)
