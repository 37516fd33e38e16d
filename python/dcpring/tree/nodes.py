"""What ``dcpring.save`` writes of a tree besides its leaves, and ``dcpring.load`` reads: its entry and its nodes."""

from __future__ import annotations

TREE_KEY = "dcpring.tree"
"""The entry that holds the tree of names."""

MEMORY = "dcpring.memory"
"""What entries are called that hold memory of which several tensors have a part, and none all."""

ROOT = "tree"
"""Where a tree lies that is no mapping."""

NAMEDTUPLE, PARAMETER, WITH_GRADIENT, HIDDEN, WITH_ATTRIBUTES, WITH_NODES, LAID_OUT = range(7)
"""Kinds of nodes of the tree of names that are written as a tuple which begins with an int: all else in it is a
container, or the name of a leaf. A namedtuple has its class, its fields and its nodes; a parameter its name and
requires_grad; a tensor that requires a gradient, and an object that DCP would take for a mapping or a tensor, their
names; an OrderedDict that has attributes, as torch's state dicts have their versions, its node and these; a tensor that
has some, as ``nn.Buffer`` does, its node and their nodes. At the root of all may be the layouts of tensors (see
``layouts``), behind the tree."""
