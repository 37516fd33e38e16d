"""Binds the extension to the libtorch that ``import torch`` has loaded. The extension imports this when it needs it."""

from __future__ import annotations

from pathlib import Path

import torch

from dcpring import _C
from dcpring.torchside.versions import required

_unknown = _C.bind_torch(
    str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"),
    torch.__version__,
    required("torch._C._aoti", "unsafe_alloc_void_ptrs_from_tensors"),
)
for _name in _unknown:  # torch 2.9 has the newest dtypes, but no function that tells their codes
    if hasattr(torch, _name):
        _C.bind_dtype(_name, [torch.empty(0, dtype=getattr(torch, _name))])
