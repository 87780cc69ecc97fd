"""Is a strategy equal to the oracle? Cells, the default grid, and its runner."""
