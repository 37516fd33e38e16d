"""A whole training state, saved and taken up again on any number of ranks. docs/resume.md is for users.

``checkpointer`` is what a training script holds, ``restore`` one load of it, ``reports`` what that tells.
``components`` is what the kinds of state share, ``sharded`` and ``whole`` have the kinds and how each comes back on
other ranks; ``optimizers``, ``schedules``, ``rng`` and ``data`` are components of their own, ``recognise`` picks one by
type. ``param_groups`` joins the groups of optimizers that ranks have different parameters of, and finds them again.
``background`` has the threads that write copies, ``manifest`` what a checkpoint says of its components, ``retention``
which steps stay, ``trees`` plain data that DCP gives back exactly.

Users call this, nothing below does. The Checkpointer owns the ranks, the thread and the buffer; components own nothing
but what the user gave them.
"""
