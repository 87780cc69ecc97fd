"""Files, numbers, caches, workers: what every other folder stands on, and nothing of attention."""
