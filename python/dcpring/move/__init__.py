"""Bytes between tensors and files, all of them through the core.

``save`` writes the items of a plan into a file, ``load`` reads the items of a plan into their tensors, ``handon`` reads
once what several ranks need. ``device`` has the pinned buffers between accelerators and host memory, ``objects``
pickles and unpickles what is no tensor, ``crc`` sums up records that are read in parts, ``buffer`` is memory that is
used again.

The store calls ``save`` and ``load`` with a plan and its planner, and owns the files; ``sources`` and ``tools`` call
``load``. A ``Saving`` or ``Loader`` is of one call and one thread. Tensors are the planner's.
"""
