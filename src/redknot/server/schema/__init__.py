"""What clients may send: every field that is known, and nothing else."""
