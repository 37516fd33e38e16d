"""Bytes between tensors and files, all of them through the core.

``save`` writes the items of a plan into a file, but for what ``unchanged`` finds in an earlier checkpoint; ``pending``
is what is written and not yet durable. ``load`` reads the items of a plan into their tensors.
``staging`` copies a state, into an ``arena``, so that it can be saved while training goes on, but for what ``frozen``
knows to be there already; ``sending`` brings such a copy to another process.

Below them ``device`` has the pinned buffers between accelerators and host memory, ``objects`` pickles and unpickles
what is no tensor, ``crc`` sums up records that are read in parts, ``buffer`` is memory that is used again,
``host_memory`` what the ranks of a host share, and ``kept`` says what a process keeps, and how to be rid of it.

The store calls ``save`` and ``load`` with a plan and its planner, and owns the files; ``sources`` and ``tools`` call
``load``. A ``Saving`` or ``Loader`` is of one call and one thread. Tensors are the planner's.
"""
