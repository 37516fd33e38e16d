"""A checkpoint's directory: ``writer`` and ``reader``, which DCP calls, and ``layout``, what lies there.

The writer makes data files, gives their places to the coordinator, and commits: ``.metadata`` is renamed last, then
what it has superseded goes. The reader opens that metadata and reads what a plan asks for. ``layout`` knows the names
of files, and which of them a save may remove. The reader takes directories of safetensors as well: ``headers`` makes of
what their headers say what ``.metadata`` says otherwise, on one rank of each host. ``once_reader`` is for several loads
from one checkpoint. ``rank_metadata`` says which metadata may be loaded, where single ranks have written theirs.
``background`` saves in a thread of its own (``async_save``), from the copies of ``stager``.

A writer or reader is the caller's, and may be used for one save or load after the other, or by several threads; what
belongs to one of them is a ``Save`` or a ``Load`` (``plan.run``), made anew when it begins.
"""
