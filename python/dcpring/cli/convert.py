"""``dcpring convert``: a checkpoint in another format, or in another number of files."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from dcpring.cli._output import Output, in_words
from dcpring.cli._parser import (
    Commands,
    add_checkpoint,
    add_json,
    add_patterns,
    add_rank,
    add_trusted,
    given_path,
    positive,
    size,
)
from dcpring.errors import CheckpointError, UntrustedCheckpointError
from dcpring.report import count, format_bytes

if TYPE_CHECKING:
    from dcpring.tools.convert import ConvertReport

_FORMATS = ("dcp", "torch", "safetensors")

_OPTIONS = {"files": "--files", "shard_bytes": "--shard-size"}
"""What arguments of ``convert`` are called here."""

DESCRIPTION = """Converts between DCP checkpoints (directories), files of torch.save, and safetensors.

DST's name says what is made, unless --to does: NAME.safetensors is one such file; .pt, .pth, .bin, .ckpt and .tar are
files of torch.save; any other name is the directory of a DCP checkpoint, or, with --shard-size, of safetensors files.
SRC is recognised by what is in it. The shards that HuggingFaceStorageWriter(save_distributed=True) leaves in a
directory are one model; they do not say how large a tensor is, so that the last rank's file must not be missing.
Data flow through a few buffers: half a GiB of memory is enough for any size.

DST is written beside where it goes, and renamed when it is complete. What stock PyTorch, and safetensors, read of it is
what was in SRC, bit by bit, unless --dtype casts it: a value that DTYPE does not have, such as 1e10 in float16, is an
error. Checksums that SRC has are compared on the way: where one is wrong, DST stays as it was. A directory that gets
safetensors may be that of a model: its configuration and tokenizer, and all other files but those of a model, stay. Of
a tensor with several names the first is stored."""

EXAMPLES = [
    ("dcpring convert ckpt/step-100 step-100.pt", "one file for torch.load, nested as it was saved"),
    (
        "dcpring convert ckpt/step-100 published.safetensors --only 'model.*' --prefix model.= --dtype bfloat16",
        "the model alone, its names without 'model.', in bfloat16",
    ),
    (
        "dcpring convert ckpt/step-100 hub --to safetensors --only 'model.*' --prefix model.= --shard-size 2G",
        "the same in shards of at most 2 GiB with an index, as model hubs have it",
    ),
    (
        "dcpring convert ckpt/step-100 hub --to safetensors --only 'model.*' --prefix model.= --exclude '*.bias' "
        "--overwrite",
        "without biases, in the place of the model that is there; its config.json and tokenizer stay",
    ),
    (
        "dcpring convert model.safetensors init --prefix =model. --files 4",
        "a DCP checkpoint of 4 files, which dcp.load({'model': ...}) reads",
    ),
    ("dcpring convert old renamed --key-map map.json", "the same checkpoint under other names"),
]


def add(commands: Commands) -> None:
    parser = commands.add(
        "convert", run, "DCP, torch.save and safetensors, each to each", DESCRIPTION, EXAMPLES, differs=""
    )
    add_checkpoint(
        parser,
        "source",
        metavar="SRC",
        help="directory of a DCP checkpoint; file of torch.save; safetensors file, its index, or their directory",
    )
    parser.add_argument("target", metavar="DST", type=given_path, help="file or directory to be made")
    parser.add_argument("--to", choices=_FORMATS, help="what to make; with safetensors a directory gets shards")
    add_patterns(parser, "--only", "only names in SRC that match, and those below; * stands for anything; repeatable")
    add_patterns(
        parser, "--exclude", "leave out names in SRC that match, and those below, whatever --only takes; repeatable"
    )
    names = parser.add_mutually_exclusive_group()
    names.add_argument("--key-map", metavar="FILE", help="new names: a JSON table (see docs/keys.md), or normalize")
    names.add_argument(
        "--prefix",
        action="append",
        default=[],
        type=_prefix,
        metavar="OLD=NEW",
        help="names that begin with OLD begin with NEW; either may be empty; repeatable",
    )
    parser.add_argument("--dtype", type=_dtype, metavar="DTYPE", help="cast floating-point tensors, e.g. to bfloat16")
    parser.add_argument("--files", type=positive, metavar="N", help="data files of a DCP checkpoint, at most")
    parser.add_argument("--shard-size", type=size, metavar="SIZE", help="most bytes of a safetensors shard (5G)")
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it exists, or the model that is in it")
    add_rank(parser)
    add_trusted(parser)
    add_json(parser)


def _prefix(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not OLD=NEW; model.= takes 'model.' away, =model. adds it")
    return old, new


def _dtype(text: str) -> str:
    from dcpring.tools.convert import float_dtype

    try:
        float_dtype(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def run(args: argparse.Namespace, out: Output) -> int:
    from dcpring.names.key_map import KeyTable
    from dcpring.tools.convert import convert

    try:
        report = convert(
            args.source,
            args.target,
            to=args.to,
            only=args.only,
            exclude=args.exclude,
            key_map=KeyTable(prefixes=dict(args.prefix)) if args.prefix else args.key_map,
            dtype=args.dtype,
            files=args.files,
            shard_bytes=args.shard_size,
            rank=args.rank,
            trusted=args.trusted,
            overwrite=args.overwrite,
            progress=not args.json,
        )
    except ValueError as error:
        raise CheckpointError(_with_options(str(error))) from error
    except UntrustedCheckpointError as error:
        raise CheckpointError(f"{args.source}: {in_words(error)}") from error
    if args.json:
        out.json(asdict(report))
    else:
        out.text(_summary(report, has_names=bool(args.prefix or args.key_map)))
    return 0


def _with_options(text: str) -> str:
    """An error of ``convert`` in the words of the command line."""
    argument, equals, rest = text.partition("=")
    option = _OPTIONS.get(argument)
    return f"{option} {rest}" if option and equals else text


def _summary(report: ConvertReport, has_names: bool) -> str:
    parts = [f"{count(report.tensors, 'tensor')} ({format_bytes(report.bytes)})"]
    parts += [count(report.objects, "object")] if report.objects else []
    notes = [f"{report.renamed or 'none'} renamed"] if has_names else []
    notes += [f"{report.cast} cast"] if report.cast else []
    notes += [f"{report.left_out} left out"] if report.left_out else []
    if report.tied and report.target_format == "safetensors":
        notes.append(f"{report.tied} stored under the name of another, which they are tied to")
    done = f"{', '.join(parts)} to {report.target} ({report.target_format}, {count(len(report.files), 'file')})"
    rate = report.bytes / max(report.seconds, 1e-9)
    return f"{done} in {report.seconds:.1f} s, {rate / 1e9:.2f} GB/s" + "".join(f"; {note}" for note in notes)
