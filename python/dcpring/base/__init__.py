"""What every room uses: collectives and notes between ranks, files, windows, equality by value, texts."""
