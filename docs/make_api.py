"""Writes docs/api.md from the docstrings of what ``dcpring`` exports.

python docs/make_api.py            # writes docs/api.md
python docs/make_api.py --check    # exit status 1 where it is not what the docstrings say
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

import dcpring
from dcpring.resume.components import Component

PAGE = Path(__file__).with_name("api.md")
HEAD = """# API

Every public class and function of `dcpring`, from their docstrings (`python docs/make_api.py` writes this page).
"""
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Source")
HOOKS = frozenset(
    {name for base in (dcp.SavePlanner, dcp.LoadPlanner, dcp.StorageWriter, dcp.StorageReader) for name in vars(base)}
    | {"exchange", "load_object", "lookup_object", "lookup_tensor", "note_staged"}
    | {"origin", "place", "seek", "stage", "storage_data", "takes_objects", "targets"}
)
"""What DCP, planners and storages call of each other; users do not."""


class _Annotation(str):
    """An annotation that stands in the signature as it does in the code, without quotes."""

    __repr__ = str.__str__


def signature(value: Any) -> str:
    try:
        found = inspect.signature(value)
    except ValueError:
        return ""
    returns = found.return_annotation
    parameters = [
        each.replace(annotation=_Annotation(each.annotation)) if isinstance(each.annotation, str) else each
        for each in found.parameters.values()
        if each.name != "self"
    ]
    shown = _Annotation(returns) if isinstance(returns, str) and returns != "None" else inspect.Signature.empty
    return str(found.replace(parameters=parameters, return_annotation=shown))


def markdown(docstring: str) -> str:
    """A docstring in Google's style as Markdown: the sections become lists, the examples code."""
    lines: list[str] = []
    section = code = False
    for line in inspect.cleandoc(docstring).splitlines():
        title = line.rstrip(":")
        if title in SECTIONS and line.endswith(":"):
            section, code = True, False
            lines += [f"**{title}**", ""]
        elif section and re.match(r" {4}\S", line):
            lines.append(_item(line.strip()))
        elif section and line.startswith(" " * 8):
            lines.append(f"  {line.strip()}")
        else:
            indented = line.startswith(" " * 4)
            if indented != code and line:
                lines[:] = _fence(lines)
                code = indented
            section = section and not line
            lines.append(line.removeprefix("    ") if indented else line)
    return "\n".join(_fence(lines) if code else lines)


def _fence(lines: list[str]) -> list[str]:
    """Opens or closes a block of code, without empty lines before its end."""
    text = "\n".join(lines).rstrip()
    return [text, *([""] if text.count("```") % 2 == 0 else []), "```"]


def _item(text: str) -> str:
    name, colon, rest = text.partition(":")
    return f"- `{name}`:{rest}" if colon and " " not in name.strip() else f"- {text}"


def members(cls: type) -> list[tuple[str, Any]]:
    """What a class defines itself for its users, with a docstring. A component's methods are for Checkpointer."""
    if issubclass(cls, Component):
        return []
    return [
        (name, value)
        for name, value in vars(cls).items()
        if not name.startswith("_") and name not in HOOKS and inspect.getdoc(value)
        if inspect.isfunction(value) or isinstance(value, (property, classmethod, staticmethod))
    ]


def entry(name: str, value: Any) -> str:
    parts = [f"## {name}", f"```python\n{name}{signature(value)}\n```", markdown(inspect.getdoc(value) or "")]
    if inspect.isclass(value):
        for member, function in members(value):
            shown = "" if isinstance(function, property) else signature(getattr(value, member))
            parts += [f"### {name}.{member}{shown}", markdown(inspect.getdoc(function) or "")]
    return "\n\n".join(parts)


def page() -> str:
    return (
        "\n\n".join([HEAD.rstrip(), *(entry(name, getattr(dcpring, name)) for name in sorted(dcpring.__all__))]) + "\n"
    )


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(PAGE.read_text() != page())
    PAGE.write_text(page())
