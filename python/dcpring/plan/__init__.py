"""Who writes and who reads what; no byte of a tensor is touched here."""
