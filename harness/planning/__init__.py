"""Building blocks of strategies: the plan builder, rings, all-to-alls, layers."""
