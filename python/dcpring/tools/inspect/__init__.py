"""Checkpoints seen from outside: what is in them, whether it is whole, how two differ."""
