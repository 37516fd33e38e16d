"""csrc/py/torch_shim.h against the installed torch: prototypes, data pointers, and what a missing symbol says."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from dcpring import _C

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "csrc" / "py" / "torch_shim.h"
SOURCE = ROOT / "csrc" / "py" / "torch_shim.c"
POINTER = re.compile(r"^\s*(\w+) \(\*(\w+)\)\(([^)]*)\);$", re.MULTILINE)


def _prototypes() -> list[tuple[str, str, str]]:
    return POINTER.findall(HEADER.read_text().split("struct torch_shim {")[1])


def test_every_function_that_is_bound_has_a_prototype() -> None:
    bound = set(re.findall(r"^\s*BIND\((\w+)\);$", SOURCE.read_text(), re.MULTILINE))
    assert bound == {name for _, name, _ in _prototypes()} and len(bound) >= 8


def _compile(folder: Path, assertions: list[str]) -> subprocess.CompletedProcess[str]:
    file = folder / "check.cpp"
    file.write_text(
        "#include <type_traits>\n#include <torch/csrc/inductor/aoti_torch/c/shim.h>\n" + "\n".join(assertions) + "\n"
    )
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    return subprocess.run(
        ["g++", "-std=c++20", "-fsyntax-only", *includes, str(file)], capture_output=True, text=True, check=False
    )


def _same(pointer: str, symbol: str) -> str:
    return f'static_assert(std::is_same_v<{pointer}, decltype(&{symbol})>, "{symbol}");'


def test_prototypes_are_those_of_the_installed_headers(tmp_path: Path) -> None:
    assertions = [_same(f"{result} (*)({args})", f"aoti_torch_{name}") for result, name, args in _prototypes()]
    constants = ["device_type_cpu", "layout_strided", *(f"dtype_{name}" for name in _dtypes_in_header())]
    assertions += [_same("int32_t (*)()", f"aoti_torch_{name}") for name in constants]
    assertions.append("static_assert(std::is_same_v<AOTITorchError, int32_t> && std::is_pointer_v<AtenTensorHandle>);")
    done = _compile(tmp_path, assertions)
    assert done.returncode == 0, done.stderr
    wrong = _compile(tmp_path, [_same("int32_t (*)(AtenTensorHandle, int32_t*)", "aoti_torch_get_data_ptr")])
    assert wrong.returncode != 0 and "static assertion failed: aoti_torch_get_data_ptr" in wrong.stderr


def _dtypes_in_header() -> list[str]:
    """The dtypes of our table for which this torch declares a function."""
    ours = re.findall(r'^\s*\{"(\w+)"', (ROOT / "csrc" / "core" / "base" / "dtype.c").read_text(), re.MULTILINE)
    folder = Path(cpp_extension.include_paths()[0], "torch", "csrc", "inductor", "aoti_torch", "c")
    declared = set(re.findall(r"aoti_torch_dtype_(\w+)\(", "".join(f.read_text() for f in folder.glob("*.h"))))
    found = [name for name in ours if name in declared]
    assert {"float32", "bfloat16", "int64", "bool", "float8_e4m3fn"} <= set(found)
    return found


def test_the_data_pointer_is_of_the_first_element(tmp_path: Path) -> None:
    """Not of the storage: a view with an offset is where it is."""
    shim = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    capsule_pointer.restype, capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    base = torch.arange(100.0).reshape(10, 10)
    views = [base, base[3:, 4:], base.t()[7:], base[9, 9], base[::3, 1::2]]
    for view, capsule in zip(views, torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(views), strict=True):
        handle = ctypes.c_void_p(capsule_pointer(capsule, None))
        pointer = ctypes.c_void_p()
        assert shim.aoti_torch_get_data_ptr(handle, ctypes.byref(pointer)) == 0
        assert pointer.value == view.data_ptr()
        assert shim.aoti_torch_delete_tensor_object(handle) == 0


def test_a_missing_symbol_is_named_with_torchs_version() -> None:
    """Some other library in torch's place; a process of its own, as the binding is the module's."""
    code = (
        "import ctypes, ctypes.util, dcpring, torch\n"
        "from dcpring import _C\n"
        "libc = ctypes.util.find_library('c')\n"
        "try:\n"
        "    _C.bind_torch(libc, '9.8.7', torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors)\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        "print(list(_C.Tensors([torch.ones(1), torch.ones(1).to_sparse()]).kinds()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    message, kinds = done.stdout.strip().split("\n")
    assert re.search(r"symbol aoti_torch_\w+ .*torch 9\.8\.7 .*install torch", message), message
    assert kinds == "[0, 2]", "the binding that was there must stay"


def test_a_library_that_is_not_loaded_is_named() -> None:
    with pytest.raises(ImportError, match=r"/nowhere/libtorch_cpu\.so .*torch 9\.8\.7"):
        _C.bind_torch("/nowhere/libtorch_cpu.so", "9.8.7", torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors)


def test_kinds_of_tensors() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    tensors = [x, x.t(), x[1:, 1:], torch.empty(0), torch.tensor(1), x.to("meta"), x.to_sparse(), x.to_sparse_csr()]
    assert list(_C.Tensors(tensors).kinds()) == [0, 0, 0, 0, 0, 1, 2, 2]
    assert list(_C.Tensors([torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)]).kinds()) == [2]
    assert list(_C.Tensors([x.reshape([1] * 64 + [6])]).kinds()) == [2], "more than 64 dimensions"
    assert list(_C.Tensors([]).kinds()) == []


@pytest.mark.parametrize("wrong", [None, "text", [1], [None], [torch.ones(1), "x"], (torch.ones(1),)])
def test_what_is_no_list_of_tensors_raises(wrong: object) -> None:
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        _C.Tensors(wrong).kinds()  # type: ignore[arg-type]


def test_importing_does_not_need_the_device_or_the_network() -> None:
    """`import dcpring` loads no library of its own that is not there on a bare machine."""
    done = subprocess.run(["ldd", _C.__file__], capture_output=True, text=True, check=True)
    needed = {line.split()[0].split("/")[-1] for line in done.stdout.splitlines()}
    assert not [name for name in needed if "torch" in name or "python" in name], needed
