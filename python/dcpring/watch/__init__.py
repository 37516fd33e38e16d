"""What others see of a save or a load while it runs: its phases, its progress, its trace."""
