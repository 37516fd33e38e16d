"""What the keys of models and optimizers are called, and how they are renamed and compared."""
