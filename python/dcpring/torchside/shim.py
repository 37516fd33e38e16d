"""Binds the extension to the libtorch that ``import torch`` has loaded. The extension imports this when it needs it."""

from __future__ import annotations

from pathlib import Path

import torch

from dcpring import _C
from dcpring.torchside.versions import required

_C.bind_torch(
    str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"),
    torch.__version__,
    required("torch._C._aoti", "unsafe_alloc_void_ptrs_from_tensors"),
)
