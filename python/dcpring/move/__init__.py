"""Bytes between tensors and files."""
