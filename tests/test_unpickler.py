"""The unpickler: data of every kind, from every Python; and nothing that a pickle can do makes it do anything else."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import functools
import io
import json
import pickle
import random
import resource
import struct
import sys
import time
import types
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _pickles
import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata

from dcpring.base.values import digest
from dcpring.format.unpickler import RefusedError, Safe, Unpickler, unpickle
from dcpring.move.objects import load, refusal

OTHERS: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("pickles.json").read_text())


# ---- what loads ----


@functools.cache
def _more() -> dict[str, Any]:
    """What has no place in _pickles.VALUES: torch's, this NumPy's, and what nests."""
    itself: list[Any] = [1]
    itself.append((itself, {"itself": itself}))
    return {
        "plain": [
            None,
            True,
            1,
            -1,
            255,
            256,
            65535,
            65536,
            1 << 31,
            -(1 << 31),
            1 << 63,
            1.5,
            float("inf"),
            "a\ud800",
        ],
        "nested": {"a": ([1, (2, {3})], {"b": frozenset({(1, 2)})})},
        "size": torch.Size([1, 2]),
        "dtypes": [torch.float32, torch.bfloat16, torch.uint8],
        "devices": [torch.device("cpu"), torch.device("cuda", 3)],
        "random states": [random.getstate(), random.Random(3), np.random.get_state(), np.random.RandomState(4)],
        "generators": [
            np.random.Generator(kind(5)) for kind in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM)
        ],
        "seeds": [np.random.SeedSequence([1, 2], spawn_key=(3,)), np.random.default_rng(1).bit_generator.state],
        "dtypes of NumPy": [
            *(np.dtype(code) for code in ("f8", ">i4", "U10", "S5", "V3", "M8", "M8[ns]", "m8[25s]", "?", "c16", "g")),
            *(np.dtype([("a", "i1"), ("b", "f8")], align=align) for align in (True, False)),
            np.dtype({"names": ["a"], "formats": ["i4"], "offsets": [4], "itemsize": 16, "titles": ["T"]}),
            np.dtype([("a", [("b", ">f4", (2, 3))])]),
        ],
        "scalars": [
            np.float16(1),
            np.str_("ab"),
            np.bytes_(b"x"),
            np.void(b"abc"),
            np.timedelta64(3, "s"),
            np.longdouble(3),
        ],
        "time": time.gmtime(0),
        "users": [collections.UserDict(a=1), collections.UserList([1]), collections.ChainMap({"a": 1})],
        "classes": [int, float, str, dict, collections.OrderedDict, torch.Tensor],
    }


@pytest.mark.parametrize("protocol", range(6))
def test_data_of_this_python(protocol: int) -> None:
    values = {**_pickles.VALUES, **_pickles.numpy_values(), **_more()}
    for name, value in values.items():
        try:
            data = pickle.dumps({"x": [value]}, protocol)
        except TypeError:
            assert protocol < 2 and name in ("buffer", "text buffer")
            continue
        found, expected = unpickle(data), pickle.loads(data)
        assert digest(found) == digest(expected), name
        assert type(found["x"][0]) is type(value), name


def test_what_holds_itself() -> None:
    for protocol in range(6):
        value: list[Any] = [1]
        value.append((value, {"x": value}))
        found = unpickle(pickle.dumps(value, protocol))
        assert found[1][0] is found and found[1][1]["x"] is found
        recursive: tuple[Any, ...] = ([],)
        recursive[0].append(recursive)
        again = unpickle(pickle.dumps(recursive, protocol))
        assert again[0][0] is again


@pytest.mark.parametrize("kind", OTHERS)
def test_data_of_other_versions(kind: str) -> None:
    values = _pickles.VALUES if kind == "python" else _pickles.numpy_values()
    assert OTHERS[kind].keys() == values.keys()
    for name, pickles in OTHERS[kind].items():
        for text in pickles:
            found = unpickle(bytes.fromhex(text))
            assert type(found) is type(values[name]), name
            if not isinstance(found, np.random.Generator):  # their streams are NumPy's
                assert digest(found) == digest(values[name]) or _equal(found, values[name]), name


def _equal(a: Any, b: Any) -> bool:
    return bool(a.dtype == b.dtype and np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)


def test_metadata_of_other_versions() -> None:
    for module in ("pathlib._local", "pathlib"):
        for name in ("PosixPath", "WindowsPath"):
            data = b"\x80\x04" + stack_global(module, name) + text("a") + b"\x85R."
            assert str(unpickle(data)) == "a"
    old = b"ctorch.distributed._shard.sharded_tensor.metadata\n"
    encoding = old + b"MEM_FORMAT_ENCODING\nK\x01\x85R"
    layout = b"(ctorch\nfloat16\nctorch.serialization\n_get_layout\n" + text("torch.strided") + b"\x85R\x88"
    by_name = called("builtins.getattr", old + b"MEM_FORMAT_ENCODING\n", text("TORCH_CHANNELS_LAST"))  # Python 3.11.2
    for member in (encoding, by_name, by_name.replace(b"builtins", b"__builtin__")):
        found = unpickle(b"\x80\x02" + old + b"TensorProperties\n)\x81" + layout + member + b"\x89tb.")
        assert type(found) is dcp_metadata.TensorProperties
        assert (found.dtype, found.layout, found.requires_grad) == (torch.float16, torch.strided, True)
        assert found.memory_format == torch.channels_last


# ---- what does not: names ----

SPENT: list[str] = []
_watched = False


def _audit(event: str, args: Any) -> None:
    if _watched and event.partition(".")[0] in _FORBIDDEN and event != "builtins.id":
        SPENT.append(f"{event} {args}")


_FORBIDDEN = {
    *("open", "exec", "compile", "import", "os", "subprocess", "socket", "ctypes", "shutil", "pty", "urllib", "code"),
    *("tempfile", "marshal", "pickle", "builtins", "sys", "mmap", "fcntl", "signal", "glob", "webbrowser", "sqlite3"),
}
sys.addaudithook(_audit)


@pytest.fixture(autouse=True)
def nothing_happens() -> Iterator[None]:
    """Python's own audit events say whether anything was opened, run, compiled or imported."""
    import dcpring.format.unpickler_numpy  # noqa: F401  # which is imported at the first name of NumPy's

    SPENT.clear()
    yield
    assert not SPENT


def refused(data: bytes) -> str:
    """Runs a pickle that must be refused, or is damaged, and gives the error's text."""
    global _watched
    _watched = True
    try:
        unpickle(data)
    except (RefusedError, ValueError) as error:
        return f"{type(error).__name__} {error}"
    finally:
        _watched = False
    raise AssertionError("it was read")


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def stack_global(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


FORBIDDEN_NAMES = """
    os.system posix.system nt.system os.popen os.execv os.remove posix.remove os.environ builtins.eval
    builtins.exec builtins.open builtins.delattr builtins.setattr builtins.__import__ builtins.compile
    builtins.globals builtins.vars builtins.breakpoint builtins.type builtins.map builtins.filter builtins.super
    builtins.memoryview builtins.input builtins.print builtins.help builtins.exit builtins.property
    builtins.classmethod builtins.enumerate __builtin__.eval __builtin__.execfile __builtin__.apply
    __builtin__.file __builtin__.reload importlib.import_module importlib.reload functools.partial
    functools.reduce functools.partialmethod operator.attrgetter operator.methodcaller operator.itemgetter
    operator.call subprocess.Popen subprocess.run shutil.rmtree sys.modules sys.exit sys.settrace
    types.FunctionType types.CodeType types.MethodType marshal.loads pickle.loads pickle.Unpickler _pickle.loads
    copyreg.pickle copyreg.add_extension copyreg.__newobj__ copyreg.__newobj_ex__
    copy_reg._reconstructor.__globals__ codecs.open codecs.decode codecs.encode _codecs.decode _codecs.lookup
    io.open _io.open _io.FileIO io.FileIO io.TextIOWrapper io.BufferedReader pathlib.Path.unlink
    pathlib.Path.read_bytes datetime.sys.modules collections.sys.modules collections.namedtuple collections._sys
    collections.Counter.fromkeys uuid.uuid1 uuid.os.system uuid._generate_time_safe random.seed random._os
    random.SystemRandom fractions.math decimal.getcontext decimal.localcontext array.array.fromfile time.sleep
    re._compile re.compile zoneinfo.ZoneInfo zoneinfo.ZoneInfo._unpickle itertools.count itertools.repeat
    threading.Thread socket.socket ctypes.CDLL weakref.ref dataclasses.make_dataclass enum.Enum pty.spawn
    asyncio.run webbrowser.open logging.config.fileConfig code.interact pdb.run timeit.timeit runpy.run_path
    site.main tempfile.mkdtemp http.server.HTTPServer multiprocessing.Process
    concurrent.futures.ThreadPoolExecutor unittest.mock.patch test.support.os distutils.sysconfig.os
    setuptools.setup pip.main torch.load torch.save torch.hub.load torch.jit.load torch.compile torch.ops
    torch.classes torch._C torch.serialization.load torch.serialization.os torch.storage._load_from_bytes
    torch.utils.data.DataLoader torch.utils._pytree.tree_map torch._utils._import_dotted_name torch.nn.Linear
    torch.zeros torch.empty torch.from_file torch.Tensor.cuda torch.distributed.rpc.rpc_sync
    torch.distributed.init_process_group torch.multiprocessing.spawn torch.fx._symbolic_trace.Tracer
    torch.package.PackageImporter numpy.load numpy.save numpy.fromfile numpy.memmap numpy.vectorize
    numpy.frompyfunc numpy.core.multiarray.fromfile numpy.lib.npyio.DataSource
    numpy.testing._private.utils.runstring numpy.core._internal.os numpy.f2py.compile
    numpy.ctypeslib.load_library numpy.random._pickle.MT19937.__init__ numpy.matrix numpy.ma.core._mareconstruct
    numpy.ndarray.tofile numpy.loads dcpring.format.unpickler.unpickle dcpring._C.unpickle test_unpickler.Mine
    __main__.anything a.b nothing
"""


@pytest.mark.parametrize("name", FORBIDDEN_NAMES.split())
def test_what_is_not_in_the_list(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    line = f"c{module}\n{attribute}\n".encode()
    arguments = b"(X\x01\x00\x00\x00at"
    forms = [
        line + arguments + b"R.",
        b"\x80\x04" + stack_global(module, attribute) + arguments + b"R.",
        b"(" + text("a") + f"i{module}\n{attribute}\n.".encode(),
        b"(" + line + text("a") + b"o.",
        line + b")\x81.",
        line + b")}\x92.",
        b"(" + line + b"l.",
    ]
    for parts in ([name.partition(".")[0], name.partition(".")[2]],) if "." in name else ():
        forms.append(b"\x80\x04" + stack_global(*parts) + arguments + b"R.")
    for data in forms:
        assert refused(data).startswith("RefusedError"), data


# ---- what does not: arguments ----

HUGE = b"\x8a\x08" + (1 << 60).to_bytes(8, "little")
NUMBER = "numpy._core.multiarray"
RECONSTRUCT = "numpy.core.multiarray._reconstruct"


def called(name: str, *arguments: bytes) -> bytes:
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n(".encode() + b"".join(arguments) + b"tR"


def made(name: str, *arguments: bytes) -> bytes:
    return called(name, *arguments)[:-1] + b"\x81"


def value(what: Any) -> bytes:
    return pickle.dumps(what, 2)[2:-1]


BAD_ARGUMENTS = {
    "bytes of a size": called("builtins.bytes", HUGE),
    "bytes of a size, made": made("builtins.bytes", HUGE),
    "bytes of a text": called("builtins.bytes", text("a"), text("idna")),
    "bytes of ints": called("builtins.bytes", value([1])),
    "bytearray of a size": called("builtins.bytearray", HUGE),
    "bytearray, encoded": called("builtins.bytearray", text("a"), text("idna")),
    "encode": called("_codecs.encode", text("a"), text("rot13")),
    "encode, imported": called("_codecs.encode", text("a"), text("antigravity")),
    "int of a text": called("builtins.int", text("9" * 10000)),
    "str of": called("builtins.str", value(1)),
    "list of a range": called("builtins.list", called("builtins.range", value(0), HUGE, value(1))),
    "set of a range": called("builtins.set", called("builtins.range", value(0), HUGE, value(1))),
    "set of a text": called("builtins.set", text("a")),
    "tuple of": called("builtins.tuple", value([1])),
    "dict of": called("builtins.dict", value({})),
    "object": called("builtins.object"),
    "range of floats": called("builtins.range", value(1.0), value(1), value(1)),
    "deque of a range": called("collections.deque", called("builtins.range", value(0), HUGE, value(1))),
    "counter of a text": called("collections.Counter", text("aab")),
    "counter of a range": called("collections.Counter", called("builtins.range", value(0), HUGE, value(1))),
    "ordered dict of": called("collections.OrderedDict", value([[1, 2]])),
    "factory": called("collections.defaultdict", b"ctorch\nTensor\n"),
    "factory of a class": called("collections.defaultdict", b"ctypes\nSimpleNamespace\n"),
    "factory of a range": called("collections.defaultdict", b"cbuiltins\nrange\n"),
    "factory and items": called("collections.defaultdict", b"cbuiltins\nint\n", value({})),
    "namespace of": called("types.SimpleNamespace", value({})),
    "complex of a text": called("builtins.complex", text("1" * 100), value(1)),
    "decimal of a float": called("decimal.Decimal", value(1.0)),
    "fraction of a power": called("fractions.Fraction", text("1e999999999")),
    "fraction of digits": called("fractions.Fraction", text("1" * 100000)),
    "fraction of large": called("fractions.Fraction", value(1 << (1 << 17)), value(3)),
    "fraction of nothing": called("fractions.Fraction", value(1), value(0)),
    "uuid of a text": called("uuid.UUID", text("0" * 32)),
    "path of a path": called("pathlib.PurePosixPath", value(1)),
    "date of ints": called("datetime.date", value(1), value(1), value(1)),
    "datetime of a zone": called("datetime.datetime", value(b"\x07\xe4\x01\x02\x03\x04\x05\x00\x00\x06"), value(1)),
    "datetime of the wrong bytes": called("datetime.datetime", value(b"\xff" * 10)),
    "timedelta of a float": called("datetime.timedelta", value(1e300)),
    "timedelta of large ints": called("datetime.timedelta", HUGE, HUGE, HUGE),
    "timezone of a number": called("datetime.timezone", value(3)),
    "time struct": called("time.struct_time", value(1)),
    "time struct of few": called("time.struct_time", value((1, 2))),
    "array of a range": called("array.array", text("b"), called("builtins.range", value(0), HUGE, value(1))),
    "array of bytes": called("array.array", text("b"), value(b"abc")),
    "array of a class": called("array._array_reconstructor", b"cbuiltins\nlist\n", text("b"), value(1), value(b"a")),
    "buffer of": made("_io.BytesIO", value(b"a")),
    "random of a seed": called("random.Random", value(3)),
    "attribute of an instance": called("builtins.getattr", called("types.SimpleNamespace"), text("__dict__")),
    "attribute of Python's": called("builtins.getattr", b"cdatetime\ndatetime\n", text("__base__")),
    "attribute that is a method": called("builtins.getattr", b"cpathlib\nPath\n", text("unlink")),
    "attribute that is shared": called("builtins.getattr", b"cdatetime\ntimezone\n", text("utc")),
    "attribute of an enumeration": called(
        "builtins.getattr", f"c{dcp_metadata.__name__}\n_MEM_FORMAT_ENCODING\n".encode(), text("__members__")
    ),
    "attribute of a module": called("builtins.getattr", text("os"), text("system")),
    "attribute or another": called("builtins.getattr", b"cpathlib\nPath\n", text("a"), text("b")),
    "reconstructor of a class": called("copyreg._reconstructor", b"cbuiltins\nint\n", b"cbuiltins\nobject\n", b"N"),
    "reconstructor of a state": called("copyreg._reconstructor", b"cuuid\nUUID\n", b"cbuiltins\nint\n", value(1)),
    "device of a number": called("torch.device", value(3)),
    "device of nowhere": called("torch.device", text("nowhere")),
    "layout": called("torch.serialization._get_layout", text("load")),
    "layout of a layout": called("torch.serialization._get_layout", text("torch.strided.__class__")),
    "size of a text": called("torch.Size", value(("a",))),
    "size of a size": called("torch.Size", HUGE),
    "tensor": called("torch.Tensor", HUGE),
    "tensor, made": made("torch.Tensor", HUGE),
    "meta tensor of": called("torch._utils._rebuild_tensor_v2", b"N", b"N", b"N", b"N", b"N", b"N"),
    "as a type": called(
        "torch._tensor._rebuild_from_type_v2", b"cbuiltins\nbytearray\n", b"ctorch\nTensor\n", HUGE + b"\x85", b"N"
    ),
    "as no type": called(
        "torch._tensor._rebuild_from_type_v2", b"ctorch._utils\n_rebuild_tensor\n", b"cbuiltins\nint\n", b")", b"N"
    ),
    "dtype of objects": called("numpy.dtype", text("O"), value(False), value(True)),
    "dtype of a text": called("numpy.dtype", text("f8, O"), value(False), value(True)),
    "dtype of a repetition": called("numpy.dtype", text("3i4"), value(False), value(True)),
    "dtype of an expression": called("numpy.dtype", text("(2,3)f8"), value(False), value(True)),
    "dtype of a large text": called("numpy.dtype", text("U99999999999"), value(False), value(True)),
    "dtype of a dict": called("numpy.dtype", value({"names": ["a"], "formats": ["O"]}), value(False), value(True)),
    "array of objects": called(RECONSTRUCT, b"cnumpy\nndarray\n", value((0,)), value(b"O")),
    "array of a size": called(
        "numpy.core.multiarray._reconstruct", b"cnumpy\nndarray\n", value((1 << 40,)), value(b"b")
    ),
    "array of a type": called(RECONSTRUCT, b"cbuiltins\nlist\n", value((0,)), value(b"b")),
    "ndarray": called("numpy.ndarray", value((1 << 40,))),
    "ndarray, made": made("numpy.ndarray", value((1 << 40,))),
    "scalar of few bytes": called(f"{NUMBER}.scalar", value(np.dtype("f8")), value(b"1")),
    "scalar of an object": called(f"{NUMBER}.scalar", value(3), value(b"1")),
    "array of few bytes": called(
        "numpy._core.numeric._frombuffer", value(b"12"), value(np.dtype("f8")), value((1 << 40,)), text("C")
    ),
    "array of overlapping": called(
        "numpy._core.numeric._frombuffer", value(b""), value(np.dtype("f8")), value((-1, 1 << 62)), text("C")
    ),
    "bit generator of a name": called("numpy.random._pickle.__bit_generator_ctor", text("os")),
    "generator of": called("numpy.random._pickle.__generator_ctor", value(3)),
    "not a function": called("builtins.Ellipsis"),
    "a result": called("torch.float32"),
    "a result of a call": called("types.SimpleNamespace") + b")R",
    "an instance made of": value(3) + b")\x81",
    "a list is called": b"])R",
    "arguments in a list": b"cbuiltins\nbytes\n]R",
    "named arguments": b"c_io\nBytesIO\n)}" + text("initial_bytes") + value(b"a") + b"s\x92",
    "arguments of a huge tuple": b"cbuiltins\nrange\n(" + b"K\x01" * 10000 + b"tR",
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_arguments_that_data_never_has(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    refused(b"\x80\x02" + BAD_ARGUMENTS[name] + b".")
    assert time.perf_counter() - started < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10, "KiB"


# ---- what does not: states ----


def built(instance: bytes, state: bytes) -> bytes:
    return instance + state + b"b"


DTYPE = called("numpy.dtype", text("V8"), b"\x89", b"\x88")
ARRAY = called(RECONSTRUCT, b"cnumpy\nndarray\n", value((0,)), value(b"b"))
MT = called("numpy.random._pickle.__bit_generator_ctor", text("MT19937"))
NAMES_OF_PYTHON = ("__class__", "__dict__", "__setstate__", "__reduce__", "__init__", "__slots__")
CLASSES = (
    *("builtins.int", "builtins.dict", "collections.OrderedDict", "collections.deque", "types.SimpleNamespace"),
    *("argparse.Namespace", "uuid.UUID", "fractions.Fraction", "pathlib.PurePosixPath", "torch.Size", "torch.Tensor"),
    *("torch.nn.parameter.Parameter", "numpy.ndarray", "numpy.dtype", "random.Random", "_io.BytesIO"),
    *(f"{dcp_metadata.__name__}.{name}" for name in ("Metadata", "MetadataIndex", "TensorProperties", "StorageMeta")),
    *("torch.distributed.checkpoint.filesystem._StorageInfo", f"{dcp_metadata.__name__}._MEM_FORMAT_ENCODING"),
    *("torch._utils._rebuild_tensor_v2", "copyreg._reconstructor", "_codecs.encode", "torch.serialization._get_layout"),
)


def mt_state(**changes: Any) -> bytes:
    state = np.random.MT19937(1).state
    state["state"].update({key: what for key, what in changes.items() if key in ("pos", "key")})
    return value({**state, **{key: what for key, what in changes.items() if key not in ("pos", "key")}})


BAD_STATES = {
    **{
        f"{cls}, {form}": built(b"c%b\n%b\n" % tuple(cls.rpartition(".")[::2][part].encode() for part in (0, 1)), state)
        for cls in CLASSES
        for form, state in {
            "state": value({"x": 1}),
            "slots": b"N" + value({"__init__": 1}) + b"\x86",
            "class": value({"__class__": 1}),
        }.items()
    },
    **{
        f"{cls} {name}": built(instance, b"}" + text(name) + b"cbuiltins\nint\ns")
        for name in NAMES_OF_PYTHON
        for cls, instance in {
            "namespace": called("types.SimpleNamespace"),
            "arguments": made("argparse.Namespace"),
            "ordered dict": called("collections.OrderedDict"),
            "metadata": made(f"{dcp_metadata.__name__}.Metadata"),
            "user dict": made("collections.UserDict"),
        }.items()
    },
    "slots of a namespace": built(called("types.SimpleNamespace"), b"N" + value({"a": 1}) + b"\x86"),
    "a namespace of a list": built(called("types.SimpleNamespace"), value([1])),
    "names that are none": built(called("types.SimpleNamespace"), value({1: 2})),
    "index of a deep tuple": built(made(f"{dcp_metadata.__name__}.MetadataIndex"), value({"fqn": ((),)})),
    "properties of nothing": built(made(f"{dcp_metadata.__name__}.TensorProperties"), value(())),
    "member of an enumeration": built(
        called(f"{dcp_metadata.__name__}._MEM_FORMAT_ENCODING", value(0)), value({"_value_": 3})
    ),
    "dtype of torch": built(b"ctorch\nfloat32\n", value({"x": 1})),
    "ellipsis": built(b"cbuiltins\nEllipsis\n", value({"x": 1})),
    "list": built(b"]", value({"x": 1})),
    "dict": built(b"}", value({"x": 1})),
    "int": built(value(1), value({"x": 1})),
    "size": built(called("torch.Size", value((1,))), value({"x": 1})),
    "fraction": built(called("fractions.Fraction", value(1), value(2)), b"N" + value({"_numerator": "x"}) + b"\x86"),
    "decimal": built(called("decimal.Decimal", text("1")), value({"x": 1})),
    "path": built(called("pathlib.PurePosixPath", text("a")), b"N" + value({"_str": 1}) + b"\x86"),
    "uuid too large": built(made("uuid.UUID"), value({"int": 1 << 128})),
    "uuid of a text": built(made("uuid.UUID"), value({"int": "x"})),
    "uuid of more": built(made("uuid.UUID"), value({"int": 1, "x": 2})),
    "uuid, unsafe": built(made("uuid.UUID"), value({"int": 1, "is_safe": 7})),
    "buffer with attributes": built(made("_io.BytesIO"), value((b"a", 0, {"__setstate__": 1}))),
    "buffer of a text": built(made("_io.BytesIO"), value(("a", 0, None))),
    "buffer before its beginning": built(made("_io.BytesIO"), value((b"a", -1, None))),
    "text buffer of bytes": built(made("_io.StringIO"), value((b"a", "\n", 0, None))),
    "text buffer of strange lines": built(made("_io.StringIO"), value(("a", "x", 0, None))),
    "deque": built(called("collections.deque", b")"), value({"x": 1})),
    "random of a text": built(called("random.Random"), value((3, "x", None))),
    "random of few": built(called("random.Random"), value((3, (1, 2), None))),
    "random far out": built(called("random.Random"), value((3, (1,) * 624 + (999999,), None))),
    "random of another version": built(called("random.Random"), value((2, (1,) * 625, None))),
    "dtype of a large field": built(DTYPE, value((3, "|", None, ("a",), {"a": (np.dtype("f8"), 4)}, 8, 1, 16))),
    "dtype of a field before": built(DTYPE, value((3, "|", None, ("a",), {"a": (np.dtype("i1"), -1)}, 8, 1, 16))),
    "dtype of no field": built(DTYPE, value((3, "|", None, ("a",), {}, 8, 1, 16))),
    "dtype of negative size": built(DTYPE, value((3, "|", None, None, None, -8, 1, 0))),
    "dtype of a huge size": built(DTYPE, value((3, "|", None, None, None, 1 << 60, 1, 0))),
    "dtype of a huge array": built(DTYPE, value((3, "|", (np.dtype("i1"), (1 << 20, 1 << 20)), None, None, 8, 1, 0))),
    "dtype of a unit": built(
        called("numpy.dtype", text("M8"), b"\x89", b"\x88"),
        value((4, "<", None, None, None, -1, -1, 0, (None, (b"x]", 1, 1, 1)))),
    ),
    "dtype of a text size": built(
        called("numpy.dtype", text("U1"), b"\x89", b"\x88"), value((3, "<", None, None, None, 7, 4, 8))
    ),
    "dtype of nothing": built(DTYPE, value(())),
    "array of too few bytes": built(ARRAY, value((1, (1 << 30,), np.dtype("f8"), False, b"12345678"))),
    "array of too many bytes": built(ARRAY, value((1, (1,), np.dtype("i1"), False, b"12345678"))),
    "array of negative size": built(ARRAY, value((1, (-1,), np.dtype("i1"), False, b""))),
    "array of a list": built(ARRAY, value((1, (1,), np.dtype("i1"), False, [1]))),
    "array of no dtype": built(ARRAY, value((1, (1,), "O", False, b"12345678"))),
    "generator beyond its end": built(MT, mt_state(pos=625)),
    "generator before its beginning": built(MT, mt_state(pos=-1)),
    "generator of few numbers": built(MT, mt_state(key=np.zeros(3, np.uint32))),
    "generator of another kind": built(MT, mt_state(bit_generator="PCG64")),
    "generator of anything": built(MT, mt_state(state=[1])),
    "items of a namespace": called("types.SimpleNamespace") + value("a") + value(1) + b"s",
    "items of a class": b"ccollections\nOrderedDict\n" + value("a") + value(1) + b"s",
    "items of a list": b"]" + value(0) + value(1) + b"s",
    "items of an array": value(np.zeros(3)) + value(0) + value(1) + b"s",
    "more of a tuple": value((1,)) + value(1) + b"a",
    "more of a class": b"ccollections\ndeque\n" + value(1) + b"a",
    "more of an array": called("array.array", text("b"), value([1])) + value(1) + b"a",
    "more of a bytearray": b"\x96" + struct.pack("<Q", 1) + b"a" + value(1) + b"a",
    "members of a dict": b"}(" + value(1) + b"\x90",
    "members of a list": b"](" + value(1) + b"\x90",
}


def _of_classes() -> list[Any]:
    found = [Unpickler(b"", Safe()).find_class(*cls.rpartition(".")[::2]) for cls in CLASSES]
    return [(cls, sorted(vars(cls)), [vars(cls)[name] for name in sorted(vars(cls))]) for cls in found if vars(cls)]


@pytest.mark.parametrize("name", BAD_STATES)
def test_states_that_data_never_has(name: str) -> None:
    before = _of_classes()
    refused(b"\x80\x02" + BAD_STATES[name] + b".")
    after = _of_classes()
    assert all(
        a[1] == b[1] and all(x is y for x, y in zip(a[2], b[2], strict=True))
        for a, b in zip(before, after, strict=True)
    )


def test_a_dtype_that_all_share_is_not_changed() -> None:
    data = called("numpy.dtype", text("f8"), b"\x89", b"\x89") + value((3, ">", None, None, None, -1, -1, 0)) + b"b"
    assert unpickle(b"\x80\x02" + data + b".") == np.dtype(">f8")
    assert np.dtype("f8").isnative


# ---- what does not: the machine ----


def nested(depth: int) -> bytes:
    return b")" + b"\x85" * depth


def shared(levels: int) -> bytes:
    """A tuple that holds one twice, which holds one twice, ..."""
    return b")" + b"2\x86" * levels


MACHINE = {
    "nothing": b"",
    "no stop": b"N",
    "an empty stack": b".",
    "a mark": b"(.",
    "a mark below": b"N(.",
    "below a mark": b"]N(a.",
    "pop of nothing": b"0.",
    "tuple of nothing": b"\x87.",
    "two of three": b"NN\x87.",
    "a dict of one": b"(Nd.",
    "a pair of one": b"}(Nu.",
    "append to nothing": b"Na.",
    "memo of nothing": b"q\x00.",
    "not memoized": b"h\x00.",
    "not memoized, far": b"j\xff\xff\xff\xff.",
    "a memo's name": b"gx\n.",
    "a memo's empty name": b"g\n.",
    "a memo's negative name": b"Np-1\n.",
    "a memo's long name": b"Np99999999999999999999\n.",
    "both ways to number": b"Nr\xff\xff\x00\x00\x94.",
    "a name of a number": b"K\x01K\x02\x93.",
    "a name of bytes": b"C\x02osC\x06system\x93.",
    "a name that is no text": b"c\xff\xfe\na\n.",
    "a text that is none": b"X\x02\x00\x00\x00\xff\xfe.",
    "an int that is none": b"Ix\n.",
    "an int with a zero": b"I012\n.",
    "an int with a nul": b"I1\x002\n.",
    "a hexadecimal int": b"L0x10\n.",
    "an int of many digits": b"L" + b"9" * 100000 + b"L\n.",
    "a float that is none": b"Fx\n.",
    "protocol": b"\x80\x06N.",
    "a frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
    "a long string": b"X\xff\xff\xff\xffa.",
    "a longer string": b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fa.",
    "long bytes": b"B\xff\xff\xff\xffa.",
    "longer bytes": b"\x8e" + struct.pack("<Q", 1 << 60) + b"a.",
    "a long bytearray": b"\x96" + struct.pack("<Q", 1 << 60) + b"a.",
    "a long int": b"\x8b\xff\xff\xff\x7fa.",
    "extension 1": b"\x82\x01.",
    "extension 2": b"\x83\x01\x00.",
    "extension 4": b"\x84\x01\x00\x00\x00.",
    "persistent": b"Pa\n.",
    "persistent, of a tuple": b"(X\x01\x00\x00\x00atQ.",
    "a buffer": b"\x97.",
    "a buffer to read": b"N\x98.",
    "a string of Python 2": b"S'a'\n.",
    "a short string of Python 2": b"U\x01a.",
    "a long string of Python 2": b"T\x01\x00\x00\x00a.",
    "an unknown opcode": b"\xff.",
    "a nul": b"\x00.",
    "a list for a key": b"}]Ns.",
    "a list in a set": b"\x8f(]\x90.",
    "a list in a frozenset": b"(]\x91.",
    "a slice for a key": b"}" + called("builtins.slice", b"N", b"N", b"N") + b"Ns.",
    "a deep key": b"}" + nested(100000) + b"Ns.",
    "a deep member": b"\x8f(" + nested(100000) + b"\x90.",
    "a deep frozen member": b"(" + nested(100000) + b"\x91.",
    "a deep member of a list": b"cbuiltins\nset\n](" + nested(100000) + b"e\x85R.",
    "a key that is shared": b"}" + shared(60) + b"Ns.",
    "a shared key of an ordered dict": called("collections.OrderedDict") + shared(60) + b"Ns.",
    "a slice of a set": b"cbuiltins\nset\n](" + called("builtins.slice", b"N", b"N", b"N") + b"e\x85R.",
}


@pytest.mark.parametrize("name", MACHINE)
def test_the_machine(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    refused(MACHINE[name])
    assert time.perf_counter() - started < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10, "KiB"


LONG_TUPLE = b"(" + b"N" * 20000 + b"t"
LONG_SIZE = b"(" + b"K\x01" * 20000 + b"t"
LONG_LIST = b"](" + b"".join(b"M" + struct.pack("<H", number) for number in range(20000)) + b"e"
LONG_DICT = b"}(" + b"".join(b"\x8c\x06%06dN" % number for number in range(20000)) + b"u"
LONG_TEXT = b"X" + struct.pack("<I", 200000) + b"a" * 200000
LONG_BYTES = b"B" + struct.pack("<I", 200000) + b"a" * 200000
LONG_INT = b"\x8b" + struct.pack("<I", 200000) + b"a" * 200000
OFTEN = {
    "a tuple as a key": (LONG_TUPLE, b"}h\x00Ns"),
    "a tuple in a set": (LONG_TUPLE, b"\x8f(h\x00\x90"),
    "a tuple in a frozenset": (LONG_TUPLE, b"(h\x00\x91"),
    "a tuple in a list for a set": (LONG_TUPLE, b"cbuiltins\nset\n](h\x00e\x85R"),
    "a tuple as a key of another dict": (LONG_TUPLE, b"ccollections\nOrderedDict\n)Rh\x00Ns"),
    "a size as a key": (b"ctorch\nSize\n" + LONG_SIZE + b"\x85R", b"}h\x00Ns"),
    "an int as a key": (LONG_INT, b"}h\x00Ns"),
    "an int in a key": (LONG_INT, b"}h\x00\x85Ns"),
    "a list made a set": (LONG_LIST, b"cbuiltins\nset\nh\x00\x85R"),
    "a list made a deque": (LONG_LIST, b"ccollections\ndeque\nh\x00\x85R"),
    "a list made an array": (LONG_LIST, b"carray\narray\n\x8c\x01lh\x00\x86R"),
    "a dict made a counter": (LONG_DICT, b"ccollections\nCounter\nh\x00\x85R"),
    "a tuple made a size": (LONG_SIZE, b"ctorch\nSize\nh\x00\x85R"),
    "a text made bytes": (LONG_TEXT, b"c_codecs\nencode\nh\x00\x8c\x06latin1\x86R"),
    "bytes made a bytearray": (LONG_BYTES, b"cbuiltins\nbytearray\nh\x00\x85R"),
    "a text made a path": (LONG_TEXT, b"cpathlib\nPurePath\nh\x00\x85R"),
    "a state of a record": (LONG_DICT, b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81h\x00b"),
    "a state of another": (LONG_DICT, b"ctypes\nSimpleNamespace\n)Rh\x00b"),
    "a state in a tuple": (LONG_TEXT, b"c_io\nStringIO\n)\x81(h\x00\x8c\x00K\x00Ntb"),
}


@pytest.mark.parametrize("name", OFTEN)
def test_what_is_long_is_not_used_often(name: str) -> None:
    """Once it may be: hashing and copying take time and memory each time, for the few bytes of a memo's number."""
    what, then = OFTEN[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(unpickle(b"\x80\x04" + what + b"q\x000](" + then + b"e.")) == 1
    with pytest.raises(ValueError, match="too often"):
        unpickle(b"\x80\x04" + what + b"q\x000](" + then * 20000 + b"e.")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10, "KiB"


def test_what_is_short_is_used_as_often_as_anyone_likes() -> None:
    key, number = ("a", 1, (2, None)), 1 << 63
    values = {"dicts": [{key: 1, number: 2} for _ in range(20000)], "keys": {(at, "b", 1.5): at for at in range(20000)}}
    for protocol in (0, 2, 4):
        assert unpickle(pickle.dumps(values, protocol)) == values
    assert unpickle(pickle.dumps({tuple(range(5000)): 1}, 4)) == {tuple(range(5000)): 1}


@pytest.mark.parametrize("field, longest", [("offset", torch.Size([1] * 1024)), ("index", (1 << 64) - 2)])
def test_what_an_index_of_metadata_has_is_no_longer_than_a_tensor_s(field: str, longest: Any) -> None:
    """It is hashed as a key, again and again if many share it: 2 MB of metadata took 9 s."""
    index = dcp_metadata.MetadataIndex("x", torch.Size([0]), 0)
    index.__dict__[field] = longest
    assert unpickle(pickle.dumps({index: 1}, 4)) == {index: 1}
    index.__dict__[field] = torch.Size([1] * 1025) if field == "offset" else 1 << 65
    with pytest.raises(ValueError, match="longer than what a tensor has"):
        unpickle(pickle.dumps({index: 1}, 4))


def test_long_ints_whose_hashes_are_the_same_are_few() -> None:
    """Each would be compared with all before it."""
    same = [at * ((1 << 61) - 1) for at in range(100, 60000)]
    assert len({hash(number) for number in same}) == 1
    with pytest.raises(ValueError, match="too often"):
        unpickle(pickle.dumps(dict.fromkeys(same[:5]), 4)[:-2] + b"(" + b"".join(map(_entry, same)) + b"u.")


def _entry(number: int) -> bytes:
    return pickle.dumps(number, 2)[2:-1] + b"N"


def test_a_memo_with_gaps_takes_no_memory() -> None:
    """Ten bytes make Python's own unpickler take 64 GiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reader = Unpickler(b"\x80\x02]r\xfe\xff\xff\xff0j\xfe\xff\xff\xff.", Safe())
    assert reader.load() == [] and not reader.plain, "and nobody else gets to read it"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_what_is_deep_or_large_but_only_data() -> None:
    assert unpickle(b"\x80\x02" + b"]" * 200000 + b"a" * 199999 + b".")
    assert unpickle(b"\x80\x02" + nested(200000) + b".")
    assert unpickle(b"\x80\x02" + called("builtins.range", value(0), HUGE, value(1)) + b".") == range(1 << 60)
    large = unpickle(b"\x80\x02" + called("decimal.Decimal", text("1e999999999")) + b".")
    assert large == decimal.Decimal("1e999999999")
    assert unpickle(b"\x80\x02" + b"}" + nested(90) + b"Ns.")


def test_every_beginning_of_a_pickle_is_damaged() -> None:
    for protocol in (0, 2, 4):
        data = pickle.dumps({**_pickles.numpy_values(), "d": _pickles.VALUES["datetime"]}, protocol)
        for end in range(0, len(data), 7):
            refused(data[:end])


def test_noise() -> None:
    """Pickles of everything, with some bytes changed: data, or an error; and others that read them find the same."""
    made = random.Random(11)
    sources = [
        pickle.dumps(what, protocol)
        for protocol in (0, 2, 4, 5)
        for what in ({**_pickles.numpy_values(), **_more()}, [*_pickles.VALUES.values()] if protocol > 1 else _more())
    ]
    read = 0
    global _watched
    for number in range(4000):
        data = bytearray(made.choice(sources))
        for _ in range(made.choice((1, 1, 2, 8))):
            data[made.randrange(len(data))] = made.choice(
                (made.randrange(256), made.choice(b"().012FIJKLMNQRVXabcdeghijlopqrstu}]"))
            )
        reader = Unpickler(bytes(data), Safe())
        _watched = True
        try:
            found = reader.load()
        except (RefusedError, ValueError, MemoryError):
            continue
        finally:
            _watched = False
        read += 1
        if reader.plain and number % 4 == 0:
            assert digest(found) == digest(pickle.loads(bytes(data)))
    assert read > 100


# ---- what the user declares safe ----


class Mine:
    """A class of the user's."""

    def __init__(self, what: Any = None) -> None:
        self.what = what

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mine) and self.what == other.what


class MyDict(dict[str, int]):
    pass


class MyInt(int):
    pass


class MyStr(str):
    pass


class Outer:
    class Inner(Mine):
        pass

    class Colour(enum.Enum):
        RED = "red"


class Slotted:
    __slots__ = ("a",)


class WithArguments:
    def __new__(cls, a: int, *, b: int) -> WithArguments:
        made = super().__new__(cls)
        made.given = a, b  # type: ignore[attr-defined]
        return made

    def __getnewargs_ex__(self) -> Any:
        return (1,), {"b": 2}


def _slotted() -> Slotted:
    made = Slotted()
    made.a = 3  # type: ignore[attr-defined]
    return made


USERS: list[Any] = [Mine(3), MyDict(a=1), MyInt(3), MyStr("a"), _slotted(), WithArguments(1, b=2), Mine([Mine()])]


@pytest.mark.parametrize("index", range(len(USERS)))
def test_classes_that_are_declared_safe(index: int) -> None:
    what = USERS[index]
    cls = type(what)
    for protocol in (4,) if cls is WithArguments else (2, 4):
        data = pickle.dumps(what, protocol)
        with pytest.raises(RefusedError, match=f"test_unpickler.{cls.__name__}") as caught:
            unpickle(data)
        assert caught.value.name == f"test_unpickler.{cls.__name__}"
        for safe in (Safe([cls]), Safe([(cls, f"test_unpickler.{cls.__name__}")])):
            assert digest(unpickle(data, safe)) == digest(pickle.loads(data))
        with torch.serialization.safe_globals([cls]):
            assert digest(unpickle(data)) == digest(pickle.loads(data))


def test_a_class_within_another() -> None:
    """Protocols below 4 ask the outer class for it, so that both have to be safe; errors name one, then the other."""
    data = pickle.dumps(Outer.Inner(3), 2)
    for safe, wanted in ([], "test_unpickler.Outer"), ([Outer], "test_unpickler.Outer.Inner"):
        with pytest.raises(RefusedError) as caught:
            unpickle(data, Safe(safe))
        assert caught.value.name == wanted
    assert unpickle(data, Safe([Outer, Outer.Inner])) == Outer.Inner(3)


def test_members_of_enumerations_by_name_and_by_value() -> None:
    outer = b"ctest_unpickler\nOuter\n"
    colour = called("builtins.getattr", outer, text("Colour"))
    by_name = b"\x80\x02" + called("builtins.getattr", colour, text("RED")) + b"."
    for data in (by_name, pickle.dumps(Outer.Colour.RED, 2)):
        assert unpickle(data, Safe([Outer, Outer.Colour])) is Outer.Colour.RED


def test_what_is_in_the_list_may_be_declared_safe_for_more() -> None:
    data = b"\x80\x02" + called("collections.Counter", text("aab")) + b"."
    refused(data)
    assert unpickle(data, Safe([collections.Counter])) == collections.Counter("aab")


# ---- archives ----


def archive_of(what: Any, **options: Any) -> io.BytesIO:
    out = io.BytesIO()
    torch.save(what, out, **options)
    out.seek(0)
    return out


WITH_TENSORS: dict[str, Any] = {
    "in a tuple": (torch.arange(3), 1),
    "with NumPy": {"t": [torch.ones(2, dtype=torch.bfloat16)], "n": np.arange(3), "d": datetime.date(2020, 1, 2)},
    "parameter": [torch.nn.Parameter(torch.ones(2))],
    "sparse": (torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()),
    "quantized": (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),),
    "meta": (torch.ones(2, device="meta"),),
    "conjugate": (torch.tensor([1 + 2j]).conj(),),
    "views": (lambda base: (base[:3], base[1:]))(torch.arange(5.0)),
    "random": {"state": torch.get_rng_state()},
    "new dtypes": (torch.ones(2, dtype=torch.uint16), torch.ones(2, dtype=torch.float8_e4m3fn)),
}


@pytest.mark.parametrize("name", WITH_TENSORS)
@pytest.mark.parametrize("forced", (False, True))
def test_tensors_in_objects(name: str, forced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read, and handed to a planner that does not ask what it unpickles."""
    if forced:
        monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    what = WITH_TENSORS[name]
    if forced and name == "with NumPy":
        with pytest.raises(RefusedError, match="numpy"):
            load(archive_of(what), Safe())
        return
    loaded = load(archive_of(what), Safe())
    assert loaded.has_tensors == (name != "meta") and digest(loaded.value) == digest(what)
    assert digest(torch.load(loaded.stream(), weights_only=False)) == digest(what)
    assert not refusal(archive_of(what).getvalue(), Safe())


def test_views_of_one_storage_stay_so() -> None:
    a, b = load(archive_of(WITH_TENSORS["views"]), Safe()).value
    a[1] = 7
    assert b[0] == 7


def storage_of(size: int, key: str = "0", kind: bytes = b"ctorch\nFloatStorage\n") -> bytes:
    return b"(" + text("storage") + kind + text(key) + text("cpu") + value(size) + b"tQ"


def forged(pickled: bytes, name: str = "data.pkl", extra: dict[str, bytes] | None = None) -> io.BytesIO:
    import zipfile

    out = io.BytesIO()
    entries = {name: pickled, "version": b"3\n", "byteorder": b"little", "data/0": bytes(16), **(extra or {})}
    with zipfile.ZipFile(out, "w") as archive:
        for entry, data in entries.items():
            archive.writestr(f"archive/{entry}", data)
    out.seek(0)
    return out


def rebuilt(
    storage: bytes, offset: int = 0, size: Any = (4,), hooks: bytes = b"ccollections\nOrderedDict\n)R"
) -> bytes:
    parts = storage + value(offset) + value(size) + value((1,) * len(size)) + b"\x89" + hooks
    return b"\x80\x02" + called("torch._utils._rebuild_tensor_v2", parts) + b"."


BAD_TENSORS = {
    "more than the archive has": rebuilt(storage_of(1 << 20), size=(1 << 20,)),
    "more by its offset": rebuilt(storage_of(4), offset=1 << 40),
    "more by its size": rebuilt(storage_of(4), size=(1 << 40,)),
    "negative": rebuilt(storage_of(-4)),
    "of no entry": rebuilt(storage_of(4, "9")),
    "of another entry": rebuilt(storage_of(4, "../data.pkl")),
    "of no storage": rebuilt(storage_of(4, kind=b"ctorch\nfloat32\n")),
    "with hooks": rebuilt(
        storage_of(4), hooks=called("collections.OrderedDict") + value(1) + b"cbuiltins\nbytearray\ns"
    ),
    **{
        f"with {name}": b"\x80\x02"
        + called(
            "torch._tensor._rebuild_from_type_v2",
            b"ctorch._utils\n_rebuild_tensor_v2\nctorch\nTensor\n",
            rebuilt(storage_of(4))[2:-2].split(b"(", 1)[1].join((b"(", b"")),
            b"}" + text(name) + b"ctorch\nTensor\ns",
        )
        + b"."
        for name in ("__class__", "__setstate__", "_backward_hooks")
    },
    "of a strange id": b"\x80\x02(" + text("module") + b"NNNNtQ.",
    "of a longer id": b"\x80\x02("
    + text("storage")
    + b"ctorch\nFloatStorage\n"
    + text("0")
    + text("cpu")
    + b"K\x01NtQ.",
    "of no id": b"\x80\x02" + b"ctorch\nFloatStorage\n0" + value("x") + b"Q.",
    "called": b"\x80\x02" + storage_of(4) + b")R.",
    "with a call": rebuilt(storage_of(4))[:-1] + b"cposix\nsystem\n" + text("x") + b"\x85R\x86.",
    "state of a tensor": rebuilt(storage_of(4))[:-1] + value({"__class__": 1}) + b"b.",
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_are_none(name: str) -> None:
    load(forged(rebuilt(storage_of(4))), Safe())
    with pytest.raises((RefusedError, ValueError, RuntimeError, TypeError)):
        load(forged(BAD_TENSORS[name]), Safe())


def test_archives_that_others_read_otherwise() -> None:
    """What is handed on is made anew around the pickle that was checked."""
    evil = pickle.dumps(_Evil(), 2)
    two = forged(value({"a": 1}).join((b"\x80\x02", b".")), extra={"x/../data.pkl": evil, "DATA.PKL": evil})
    front = io.BytesIO(forged(evil).getvalue() + two.getvalue())
    behind = io.BytesIO(two.getvalue() + forged(evil).getvalue())
    for archive in (two, front, behind):
        try:
            loaded = load(archive, Safe())
        except (RefusedError, RuntimeError, ValueError):
            continue
        assert loaded.value == {"a": 1}
        assert torch.load(loaded.stream(), weights_only=False) == {"a": 1}
    assert not _RAN


@pytest.mark.parametrize("around", [b"", b"a comment"])
def test_a_pickle_that_is_compressed_is_not_unpacked(around: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would: 44 kB of these are 43 MB of a pickle, which takes 650 MB to run. It never sees them."""
    import zipfile

    monkeypatch.setattr(torch, "load", None)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.comment = around
        archive.writestr("archive/data.pkl", b"\x80\x02(" + b"]0" * 1_000_000 + rebuilt(storage_of(4))[3:])
        archive.writestr("archive/data/0", bytes(16))
    with pytest.raises(ValueError, match="directory is damaged" if around else "is compressed"):
        load(packed, Safe())


_RAN: list[int] = []


class _Evil:
    def __reduce__(self) -> Any:
        return _RAN.append, (1,)


def test_torchscript_is_refused(tmp_path: Path) -> None:
    script = torch.jit.script(torch.nn.Linear(1, 1))
    torch.jit.save(script, tmp_path / "script.pt")
    with pytest.raises(ValueError, match=r"torch\.jit\.save"):
        load(io.BytesIO((tmp_path / "script.pt").read_bytes()), Safe())


def test_old_archives() -> None:
    loaded = load(archive_of({"a": [1, torch.ones(2)]}, _use_new_zipfile_serialization=False), Safe())
    assert torch.equal(torch.load(loaded.stream(), weights_only=False)["a"][1], torch.ones(2))


# ---- what a save says ----


def test_refusals_are_those_of_a_load() -> None:
    good = [
        *_pickles.VALUES.values(),
        *_pickles.numpy_values().values(),
        *WITH_TENSORS.values(),
        "c a\nb\n",
        "cos\nsystem\n",
    ]
    for what in good:
        assert refusal(archive_of(what).getvalue(), Safe()) == "", what
        assert refusal(archive_of({"x": [what]}, pickle_protocol=4).getvalue(), Safe()) == ""
    bad = {
        "test_unpickler.Mine": [Mine(), [Mine()], {"a": (1, Mine())}, (torch.ones(1), Mine())],
        "test_unpickler.MyInt": [MyInt(3)],
        "collections.defaultdict": [collections.defaultdict(types.SimpleNamespace)],
        "functools.partial": [functools.partial(int, 3)],
        "builtins.len": [len],
        "numpy.dtype": [np.array([None, 1], dtype=object)],
    }
    for name, values in bad.items():
        for what in values:
            assert refusal(archive_of(what).getvalue(), Safe()) == name, what
            assert refusal(archive_of(what, pickle_protocol=4).getvalue(), Safe()) == name
    assert refusal(archive_of(Mine()).getvalue(), Safe([Mine])) == ""


def test_uuids_of_this_machine() -> None:
    for what in (uuid.uuid1(), uuid.uuid4()):
        assert unpickle(pickle.dumps(what)) == what
