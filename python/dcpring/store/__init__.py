"""A checkpoint's directory: the storage writer and reader of DCP, and what lies in the folder."""
