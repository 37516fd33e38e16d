"""Plain data of every kind that a load takes, and pickles of it as other versions of Python and NumPy wrote them.

``python tests/_pickles.py`` prints those of the Python that runs it, ``--numpy`` those of its NumPy: that is how
tests/pickles.json was made, with Python 3.8.18 to 3.14.4, NumPy 1.19.5, 1.26.4 and 2.5.5. No torch is needed.
"""

import argparse
import array
import collections
import datetime
import decimal
import fractions
import io
import json
import pathlib
import pickle
import sys
import types
import uuid

PROTOCOLS = (0, 2, 4, 5)

VALUES = {
    "no bytes": b"",
    "bytes": b"a\xff",
    "bytearray": bytearray(b"a\xff"),
    "complex": 1 + 2j,
    "set": {1},
    "frozenset": frozenset({1}),
    "range": range(1, 5, 2),
    "slice": slice(1, None),
    "ellipsis": ...,
    "large int": -(1 << 80),
    "text": "\u20ac\n\\",
    "deque": collections.deque([1], 3),
    "defaultdict": collections.defaultdict(int, a=1),
    "counter": collections.Counter("a"),
    "ordered dict": collections.OrderedDict(a=1),
    "datetime": datetime.datetime(2020, 1, 2, 3, 4, 5, 6, datetime.timezone.utc),  # noqa: UP017
    "date": datetime.date(2020, 1, 2),
    "time": datetime.time(1, 2),
    "timedelta": datetime.timedelta(1, 2, 3),
    "timezone": datetime.timezone(datetime.timedelta(hours=1), "x"),
    "decimal": decimal.Decimal("1.50"),
    "fraction": fractions.Fraction(-1, 3),
    "uuid": uuid.UUID(int=5),
    "path": pathlib.PosixPath("/a/b"),
    "pure path": pathlib.PurePosixPath("a/b"),
    "windows path": pathlib.PureWindowsPath("c:/a"),
    "array": array.array("i", [1, 2]),
    "namespace": types.SimpleNamespace(a=1),
    "arguments": argparse.Namespace(a=1),
    "buffer": io.BytesIO(b"ab"),
    "text buffer": io.StringIO("ab"),
}


def numpy_values():
    import numpy as np

    return {
        "float32": np.float32(1.5),
        "bool": np.bool_(True),
        "array": np.arange(3, dtype="i4"),
        "strings": np.array(["a", "bc"]),
        "dates": np.array(["2020-01-02"], dtype="M8[D]"),
        "date": np.datetime64("2020-01-02", "s"),
        "structured": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8", (2,))]),
        "fortran": np.asfortranarray(np.arange(4).reshape(2, 2)),
        "empty": np.zeros((0, 3)),
        "dtype": np.dtype("f8"),
        "generator": np.random.Generator(np.random.SFC64(3)),
        "philox": np.random.Generator(np.random.Philox(3)),
    }


def pickled(values):
    """{name: [hex of each pickle]}, without those that are alike."""
    found = {}
    for name, value in values.items():
        for protocol in PROTOCOLS:
            try:
                data = pickle.dumps(value, protocol).hex()
            except (TypeError, pickle.PicklingError):  # BytesIO in the oldest protocols
                continue
            if data not in found.setdefault(name, []):
                found[name].append(data)
    return found


if __name__ == "__main__":
    print(json.dumps(pickled(numpy_values() if "--numpy" in sys.argv else VALUES)))
