"""Mirrors of ``torch.distributed.checkpoint.state_dict``.

``interface`` has the functions that users call; ``by_name`` those of a ``Checkpointer``. Each makes a ``request``: the
model, its names, the options. ``models`` and ``optimizers`` make state dicts, ``models`` and ``set_optimizers`` load
them; ``loaded`` looks up what is in one. Models and optimizers are the caller's.
"""
