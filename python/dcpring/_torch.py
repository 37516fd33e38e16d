"""Binds the extension to the libtorch that ``import torch`` has loaded. The extension imports this when it needs it."""

from __future__ import annotations

from pathlib import Path

import torch

from dcpring import _C


def _bind() -> None:
    try:
        alloc_handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
    except AttributeError as error:
        raise ImportError(
            f"dcpring needs torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors, which torch {torch.__version__} "
            "does not have; install torch 2.9 or newer"
        ) from error
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    _C.bind_torch(str(library), torch.__version__, alloc_handles)


_bind()
