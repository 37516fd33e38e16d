"""What looks at checkpoints and traces from outside, and what changes checkpoints."""
