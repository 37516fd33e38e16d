"""What every room uses, and what uses no room but ``torchside``.

``groups`` is how ranks find each other, agree and talk, through the store or in a collective; ``joint`` is an operation
of several ranks, where what one raises is raised by all, ``ranks`` a process group of their own for such operations.
``files`` reads and replaces small files, ``shared_memory`` is
memory that processes of a host share, ``memory`` tells which tensors are the same memory, ``samples`` picks some bytes
of one, ``windows`` cuts what is too large to be handled at once, and reads ahead, ``values`` is equality by value,
``random_states`` keeps generators as they were, ``collector`` pauses cyclic garbage collection, ``pickling`` tells what
can be sent to another process, ``casts`` what another dtype makes of values, ``text`` puts ranks into words.

Nothing here belongs to a save or load. What lives as long as the process (counters of attempts, the finished
collectives of a group) is in ``groups``, below a lock.
"""
