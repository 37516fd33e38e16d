"""Traces: ``phases`` takes the times of a save or load, ``file`` writes them, the others read and explain them."""
