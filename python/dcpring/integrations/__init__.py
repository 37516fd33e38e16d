"""The room in which others are brought to use dcpring: ``install()`` today; a trainer's plug is a module of its own.

What is here uses only what the other rooms offer, and what torch and trainers make public. ``install`` is imported
without torch, at the start of any Python where ``DCPRING_INSTALL`` is set; what needs torch is in ``stand_in``.
"""
