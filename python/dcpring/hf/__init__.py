"""Directories of safetensors, as Hugging Face's libraries write and load them. docs/huggingface.md is for users.

``writer`` and ``reader`` are storages of DCP's: the first lays a model out in files that all ranks write together
(``file_plan``: which rank writes which bytes; ``stripes``: one rank's part of it) and commits them (``commit``); the
second is RingReader, which knows such directories anyway (``store.headers``), with the arguments of
HuggingFaceStorageReader. ``rearrange`` makes the tensors that are stored of views of those that a model has,
``conversions`` asks transformers how, and ``configs`` writes a model's configuration. ``pretrained`` loads and saves a
model by all of these; ``exports`` is what a Checkpointer leaves beside its checkpoints.

``sources``, ``resume`` and users call this. A writer or reader is its caller's, as those of ``store`` are.
"""
