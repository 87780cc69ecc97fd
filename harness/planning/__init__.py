"""What strategies are written with: the plan builder, rings, all-to-alls, layers."""
