"""The proof that a plan computes attention, exactly once and nothing else."""
