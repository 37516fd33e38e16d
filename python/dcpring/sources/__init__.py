"""Checkpoints of any format, as items whose bytes can be read, and as what they can be written to."""
