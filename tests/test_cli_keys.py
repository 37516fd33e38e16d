"""``dcpring keys``: names, what wrappers put in, what a key map makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import _cli
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

from dcpring import KeyTable, RingWriter
from dcpring.names.key_map import Rule
from dcpring.tools.keys import report_keys

WRITERS: dict[str, Any] = {"stock": FileSystemWriter, "ring": RingWriter}


def _save(path: Path, keys: Any, writer: str = "ring", **options: Any) -> Path:
    state = dict.fromkeys(keys, 1) if not isinstance(keys, dict) else keys
    dcp.save(state, storage_writer=WRITERS[writer](path, **options), no_dist=True)
    return path


def _document(*args: object) -> Any:
    return json.loads(_cli.run("keys", *args, "--json").out)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_wrapped_model(tmp_path: Path, writer: str) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(torch.compile(nn.Linear(2, 2)), nn.Linear(2, 2))

    _save(tmp_path, {"model": Wrapper().state_dict()}, writer)
    document = _document(tmp_path)
    assert set(document) == {
        *("checkpoint", "problem", "origins", "clashes", "collisions", "unused_rules", "saved_key_map", "keys")
    }
    rows = {row["key"]: row for row in document["keys"]}
    assert rows["model.module.0._orig_mod.weight"] == {
        "key": "model.module.0._orig_mod.weight",
        "canonical": "model.module.0.weight",
        "ambiguous": True,
        "mapped": None,
    }
    origins = {origin["part"]: origin for origin in document["origins"]}
    assert list(origins) == ["_orig_mod", "module"]
    assert origins["_orig_mod"]["certain"] and origins["_orig_mod"]["keys"] == 2
    assert (
        origins["_orig_mod"]["places"] == ["model.module.0._orig_mod"] and "compile" in origins["_orig_mod"]["origin"]
    )
    assert not origins["module"]["certain"] and origins["module"]["keys"] == 4
    text = _cli.run("keys", tmp_path)
    assert text.status == 0 and "torch.compile(module)" in text.out and "may be the model's own" in text.out
    (line,) = (line for line in text.out.splitlines() if line.startswith("model.module.1.bias"))
    assert line.split() == ["model.module.1.bias", "="]


def test_plain_names(tmp_path: Path) -> None:
    assert "No part of these names is one that wrappers use" in _cli.run("keys", _save(tmp_path, ["a.b", "c"])).out


def test_a_key_map(tmp_path: Path) -> None:
    keys = ["module.a", "module.b", "c", "d.1", "e"]
    table = tmp_path / "map.json"
    table.write_text(
        json.dumps(
            {
                "exact": {"c": "new c", "nothing": "x"},
                "prefixes": {"module.": "", "never.": "y."},
                "patterns": [["d\\.(\\d)", "d\\1"], ["d.*", "unreached"]],
            }
        )
    )
    document = _document(_save(tmp_path / "c", keys), "--key-map", table)
    assert {row["key"]: row["mapped"] for row in document["keys"]} == {
        **{"module.a": "a", "module.b": "b", "c": "new c", "d.1": "d1", "e": "e"}
    }
    unused = [(rule["kind"], rule["old"]) for rule in document["unused_rules"]]
    assert unused == [("exact", "nothing"), ("prefix", "never."), ("pattern", "d.*")]
    text = _cli.run("keys", tmp_path / "c", "--key-map", table)
    assert text.status == 0 and "renames 4 of 5 keys" in text.out
    assert "No key is renamed by the prefix 'never.' (to 'y.')" in text.out


def test_collisions(tmp_path: Path) -> None:
    keys = ["a", "module.a", "b", "_orig_mod.b"]
    table = tmp_path / "map.json"
    table.write_text('{"prefixes": {"module.": ""}}')
    path = _save(tmp_path / "c", keys)
    result = _cli.run("keys", path, "--key-map", table)
    assert result.status == 1 and "a, module.a would all become a with the key map" in result.err
    assert _document(path, "--key-map", table)["collisions"] == {"a": ["a", "module.a"]}
    assert _document(path)["clashes"] == {"b": ["b", "_orig_mod.b"]}
    assert _cli.run("keys", path).status == 0
    assert _cli.run("keys", path, "--key-map", "normalize").status == 1


def test_key_maps_that_are_none(tmp_path: Path) -> None:
    path = _save(tmp_path / "c", ["a.1"])
    for text in ("{", '{"prefix": {}}', '{"patterns": [["(", "x"]]}', '{"patterns": [["a.*", "\\\\7"]]}'):
        (tmp_path / "map.json").write_text(text)
        result = _cli.run("keys", path, "--key-map", tmp_path / "map.json")
        assert result.status == 2 and "Traceback" not in result.err and result.err and not result.out, text
    assert "cannot be read" in _cli.run("keys", path, "--key-map", tmp_path / "nothing").err


def test_the_map_of_the_save(tmp_path: Path) -> None:
    table = KeyTable(prefixes={"m.": "model."}, source="v1", target="v2")
    _save(tmp_path, {"m": {"a": torch.ones(1), "b": 2}}, key_map=table)
    saved = _document(tmp_path)["saved_key_map"]
    assert saved["exact"] == {"m.a": "model.a", "m.b": "model.b"} and saved["from"] == "v1"
    assert "Saved with a key map (v1 to v2)" in _cli.run("keys", tmp_path).out
    (tmp_path / ".dcpring.json").write_text("{")
    result = _cli.run("keys", tmp_path)
    assert result.status == 0 and "cannot be read" in result.err


def test_rules_name_what_they_did() -> None:
    table = KeyTable({"a": "b"}, {"x.": "y."}, (("z(.)", "\\1"),))
    assert [table.apply(name) for name in ("a", "x.1", "z2", "other")] == [
        ("b", Rule("exact", "a", "b")),
        ("y.1", Rule("prefix", "x.", "y.")),
        ("2", Rule("pattern", "z(.)", "\\1")),
        ("other", None),
    ]
    assert [rule.kind for rule in table.rules()] == ["exact", "prefix", "pattern"]


def test_hostile_names() -> None:
    deep = ".".join(["module"] * 20_000)
    report = report_keys([deep, "\ud800.x", "", ".", "module", "a.module.module.x"])
    assert [origin.keys for origin in report.origins] == [2], "the last part is a tensor's own name"
    assert report.rows[1].canonical == "\ud800.x"
    many = report_keys([f"_orig_mod.layers.{i}.w" for i in range(100_000)])
    assert many.origins[0].places == ["_orig_mod"] and not many.clashes


def test_in_a_terminal(tmp_path: Path) -> None:
    _save(tmp_path, [f"_orig_mod.layers.{i}.{j}.w" for i in range(8) for j in range(2)] + ["evil\x1b]0;x\x07"], "stock")
    result = _cli.run_in_terminal("keys", tmp_path, "--key-map", "normalize")
    assert result.status == 0 and "_orig_mod.layers.0-7.0-1.w" in result.plain and "layers.0-7.0-1.w" in result.plain
    assert "evil\\x1b]0;x\\x07" in result.plain and "\x07" not in result.out
    assert "renames 16 of 17 keys" in result.plain
