"""Fast, safe storage for ``torch.distributed.checkpoint`` (DCP), in C on io_uring.

    import torch.distributed.checkpoint as dcp
    from dcpring import RingLoadPlanner, RingReader, RingSavePlanner, RingWriter

    dcp.save(state_dict, storage_writer=RingWriter("ckpt/step-100"), planner=RingSavePlanner())
    dcp.load(state_dict, storage_reader=RingReader("ckpt/step-100"), planner=RingLoadPlanner())

What either writes, stock DCP reads, and the reverse.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcpring.errors import CheckpointError, CorruptCheckpointError, KeyMismatchError, UntrustedCheckpointError
    from dcpring.hf.pretrained import load_pretrained, save_pretrained_weights
    from dcpring.hf.reader import RingHFReader, RingQuantizedHFReader
    from dcpring.hf.rearrange import Rearrange, rearranged
    from dcpring.hf.writer import RingHFWriter
    from dcpring.integrations.install import Installation, install, uninstall
    from dcpring.move.kept import empty_cache
    from dcpring.names.state_dict.interface import (
        get_model_state_dict,
        get_optimizer_state_dict,
        get_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
        set_state_dict,
    )
    from dcpring.names.wrapping import register_wrapper
    from dcpring.options import IOStats
    from dcpring.plan.load_planner import RingLoadPlanner
    from dcpring.plan.save_planner import RingSavePlanner
    from dcpring.report import LoadReport, Metrics, PlanReport, RankReport, ReadReport
    from dcpring.resume.background import SaveHandle
    from dcpring.resume.checkpointer import Checkpointer
    from dcpring.resume.data import ElasticDataset, ElasticLoader, ElasticSampler
    from dcpring.resume.reports import ComponentReport, ResumeReport
    from dcpring.resume.rng import RNG
    from dcpring.resume.sharded import Sharded
    from dcpring.resume.whole import Elastic, PerRank, Replicated
    from dcpring.store.background import AsyncSaveResponse, async_save
    from dcpring.store.reader import RingReader
    from dcpring.store.stager import RingStager
    from dcpring.store.writer import RingWriter
    from dcpring.tools.convert import ConvertReport, convert
    from dcpring.tools.inspect.compare import CheckpointDiff, ObjectDiff, TensorDiff, diff_checkpoints
    from dcpring.tools.inspect.verify import Problem, VerifyReport, verify
    from dcpring.tools.keys import KeyDiff, KeyTable, diff_keys, print_keys, saved_key_map
    from dcpring.tree.load import load
    from dcpring.tree.save import save
    from dcpring.watch.progress import Progress

__all__ = [
    "RNG",
    "AsyncSaveResponse",
    "CheckpointDiff",
    "CheckpointError",
    "Checkpointer",
    "ComponentReport",
    "ConvertReport",
    "CorruptCheckpointError",
    "Elastic",
    "ElasticDataset",
    "ElasticLoader",
    "ElasticSampler",
    "IOStats",
    "Installation",
    "KeyDiff",
    "KeyMismatchError",
    "KeyTable",
    "LoadReport",
    "Metrics",
    "ObjectDiff",
    "PerRank",
    "PlanReport",
    "Problem",
    "Progress",
    "RankReport",
    "ReadReport",
    "Rearrange",
    "Replicated",
    "ResumeReport",
    "RingHFReader",
    "RingHFWriter",
    "RingLoadPlanner",
    "RingQuantizedHFReader",
    "RingReader",
    "RingSavePlanner",
    "RingStager",
    "RingWriter",
    "SaveHandle",
    "Sharded",
    "TensorDiff",
    "UntrustedCheckpointError",
    "VerifyReport",
    "async_save",
    "convert",
    "diff_checkpoints",
    "diff_keys",
    "empty_cache",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "install",
    "load",
    "load_pretrained",
    "print_keys",
    "rearranged",
    "register_wrapper",
    "save",
    "save_pretrained_weights",
    "saved_key_map",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
    "uninstall",
    "verify",
]
__version__ = "0.1.0"

_MODULES = {
    "tools.inspect.compare": ("CheckpointDiff", "ObjectDiff", "TensorDiff", "diff_checkpoints"),
    "integrations.install": ("Installation", "install", "uninstall"),
    "tools.convert": ("ConvertReport", "convert"),
    "tools.inspect.verify": ("Problem", "VerifyReport", "verify"),
    "watch.progress": ("Progress",),
    "resume.background": ("SaveHandle",),
    "resume.checkpointer": ("Checkpointer",),
    "resume.sharded": ("Sharded",),
    "resume.whole": ("Elastic", "PerRank", "Replicated"),
    "resume.data": ("ElasticDataset", "ElasticLoader", "ElasticSampler"),
    "errors": ("CheckpointError", "CorruptCheckpointError", "KeyMismatchError", "UntrustedCheckpointError"),
    "tools.keys": ("KeyDiff", "KeyTable", "diff_keys", "print_keys", "saved_key_map"),
    "names.wrapping": ("register_wrapper",),
    "plan.load_planner": ("RingLoadPlanner",),
    "hf.rearrange": ("Rearrange", "rearranged"),
    "options": ("IOStats",),
    "plan.save_planner": ("RingSavePlanner",),
    "hf.reader": ("RingHFReader", "RingQuantizedHFReader"),
    "hf.writer": ("RingHFWriter",),
    "store.background": ("AsyncSaveResponse", "async_save"),
    "store.reader": ("RingReader",),
    "report": ("LoadReport", "Metrics", "PlanReport", "RankReport", "ReadReport"),
    "hf.pretrained": ("load_pretrained", "save_pretrained_weights"),
    "resume.reports": ("ComponentReport", "ResumeReport"),
    "resume.rng": ("RNG",),
    "tree.load": ("load",),
    "tree.save": ("save",),
    "move.kept": ("empty_cache",),
    "names.state_dict.interface": (
        "get_model_state_dict",
        "get_optimizer_state_dict",
        "get_state_dict",
        "set_model_state_dict",
        "set_optimizer_state_dict",
        "set_state_dict",
    ),
    "store.stager": ("RingStager",),
    "store.writer": ("RingWriter",),
}
"""What each module offers; it is imported when that is asked for. The command line starts without torch."""

_PUBLIC = ("cli", "data", "errors", "metrics", "options", "report", "state_dict")
"""Modules that are paths of their own; the rooms are private, whatever is public of them is above."""

_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return importlib.import_module(f"dcpring.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dcpring.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PUBLIC})


if os.environ.get("DCPRING_INSTALL", "0") not in ("", "0"):
    from dcpring.integrations.install import install_if_asked_for

    install_if_asked_for()
