"""What the keys of models and optimizers are called. docs/keys.md is for users.

``wrapping`` finds the wrappers in a model and the names without them, ``state_dict`` mirrors torch's module of that
name with these, ``first_step`` is the state that an optimizer has not made yet, ``parts`` a model in several parts.
``key_map`` renames metadata and results, ``diff`` compares names and shapes, ``policy`` says what a load does about
differences.

Users call ``state_dict``; so does ``resume``. Planners and storage apply a key map to metadata, never to data files.
Models and optimizers are the caller's: nothing here changes or keeps them.
"""
