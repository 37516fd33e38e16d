"""What a checkpoint's files say: the metadata and its tables, pickles, zips."""
