"""The tables of docs/keys.md, from a run: ``python tests/_wrapper_table.py`` puts them in, a test checks them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from _wrappers import OWN, WRAPPERS, Case, Net, build, plain_values, quiet, raw_keys
from torch import nn
from torch.distributed.checkpoint import state_dict as stock

import dcpring
from dcpring.state_dict import StateDictOptions

PAGE = Path(__file__).resolve().parent.parent / "docs" / "keys.md"
PAGE_TORCH = "2.13."
"""The version of torch that the page's tables are of."""

TENSOR = "block.up.weight"
"""The tensor whose names are shown."""

_LAST = re.compile(r"(^|\.)up\.(parametrizations\.)?weight(\.original)?$")


def _name(keys: Callable[[], list[str]]) -> str:
    """What the tensor is called, or the error."""
    try:
        found = [key for key in keys() if _LAST.search(key)]
    except Exception as error:
        return type(error).__name__
    return ", ".join(f"`{key}`" for key in found) or "lost"


def _round_trip(case: Case) -> str:
    """Names and bits from wrapped to plain and back; "" when all are right."""
    plain = dict(Net(0).state_dict())
    try:
        values = plain_values(dcpring.get_model_state_dict(build(case, seed=0)))
        target = Net(1)
        dcpring.set_model_state_dict(target, values)
        back = build(case, seed=1)
        options = StateDictOptions(strict=False, full_state_dict="FSDP2" in (case.outer, case.inner))
        dcpring.set_model_state_dict(back, dict(target.state_dict()), options=options)
        again = plain_values(dcpring.get_model_state_dict(back))
    except ValueError as error:
        return str(error)
    right = all(torch.equal(value, state[key]) for state in (values, again) for key, value in plain.items())
    return "" if right and values.keys() == again.keys() == plain.keys() else "wrong"


def _made(case: Case) -> nn.Module | None:
    """None for what torch cannot nest: make, save, or load again by itself."""
    try:
        model = build(case)
        raw_keys(model)
        if "FSDP1" not in case.outer + case.inner or "FSDP2" in case.outer:
            model.load_state_dict(model.state_dict())
    except Exception:
        return None
    return model


def _cells(case: Case) -> tuple[str, str, str]:
    model = _made(case)
    if model is None:
        return "torch cannot", "", ""
    theirs = _name(lambda: list(stock.get_model_state_dict(model)))
    problem = _round_trip(case)
    ours = problem or _name(lambda: [key for key in dcpring.get_model_state_dict(model) if key not in OWN])
    return _name(lambda: raw_keys(model)), theirs, ours


def _rows() -> Iterator[str]:
    yield "| outer | inner | raw, root | stock, root | raw, block | stock, block | dcpring, both |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for outer in ("", *WRAPPERS):
        for inner in WRAPPERS:
            root, block = (_cells(Case(outer, inner, where)) for where in ("root", "block"))
            ours = root[2] if root[2] == block[2] else "; ".join(filter(None, (root[2], block[2])))
            cells = (outer, inner, root[0], root[1], block[0], block[1], ours)
            yield f"| {' | '.join(cells)} |"


def table() -> str:
    """The table in Markdown; needs a process group of one rank."""
    quiet()
    return "\n".join(_rows())


def names_of_ours(text: str) -> dict[tuple[str, str], str]:
    """What dcpring calls the tensor, by outer and inner wrapper; without those that torch cannot nest."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.count("|") == 8]
    return {(row[0], row[1]): row[-1] for row in cells if row[-1].startswith("`")}


def in_page(text: str, made: str) -> str:
    """The page with the table put between its marks."""
    before, _, rest = text.partition("<!-- table -->\n")
    _, _, after = rest.partition("<!-- end of table -->")
    return f"{before}<!-- table -->\n{made}\n<!-- end of table -->{after}"


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    PAGE.write_text(in_page(PAGE.read_text(), table()))
    dist.destroy_process_group()
