"""Who writes and who reads what. No byte of a tensor is touched here, but for fingerprints of small ones, and pieces.

DCP calls ``save_planner`` and ``load_planner``. Both ``flatten`` a state dict and describe what a rank has as a
``table`` of C, from whose ``rows`` DCP's ``items`` are made only when somebody looks; ``messages`` is what ranks and
the coordinator send each other, and what comes of it; ``cache`` is what is kept from save to save. ``placements`` says
which boxes a DTensor has on a rank, ``strategy`` who may write, ``replicas`` whether ranks that should hold the same
do. ``sharing`` gives what several ranks will read a reader, in ``pieces``. ``run`` has the ``Save`` and its like: what
belongs to one save or load, which storage and planner share.

A plan belongs to the planner that made it, and its table to the plan; the coordinator gets encoded copies. What is kept
from save to save is of the module, by a name that is pickled with the planner.
"""
