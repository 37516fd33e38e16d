"""Checkpoints of any format, as items of which any part can be read, and as targets.

``stream`` is what formats have in common: items, the order in which a target wants them, windows that are read ahead.
``dcp``, ``torch_file`` and ``safetensors`` are the three formats, each as a source and as a target; ``beside`` makes a
target's files where nobody sees them until they are whole. ``contents`` opens a checkpoint without a state dict and
without torch, and is below all that looks at one; ``parts`` reads tensors and objects of it.

``tools`` call this. A source owns the files it has opened, and is closed by who opened it.
"""
