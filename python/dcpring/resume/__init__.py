"""A whole training state, saved and taken up again on any number of ranks."""
