"""The plan: problem, tasks, chunks, heads, what waits for what, and kernel calls of a tile."""
