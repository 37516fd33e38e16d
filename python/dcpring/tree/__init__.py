"""``dcpring.save`` and ``dcpring.load``: a tree of one process, which comes back exactly as it was.

``save`` takes a tree apart into entries of a DCP checkpoint and a tree of their names, ``load`` puts it together again.
``nodes`` has what that tree is made of, ``layouts`` how tensors lie in memory: which share some, and in which order.

Users call this; so does Lightning's plug. No collective is called, whether or not there is a process group.
"""
