"""The room in which others are brought to use dcpring: ``install()`` and, in a module each, trainers' plugs.

What is here uses only what the other rooms offer, and what torch and trainers make public. ``install`` is imported
without torch, at the start of any Python where ``DCPRING_INSTALL`` is set; what needs torch is in ``stand_in``.

A trainer's plug imports the trainer, and nothing imports the plug: trainers are no dependencies. ``docs/trainers/``
has a page for each.
"""
