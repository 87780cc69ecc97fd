"""Which strategy to use for a problem on a cluster, how sure that is, and what would confirm it."""
