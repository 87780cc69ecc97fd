"""Plans of heads and context: meshes of ranks, and gathers of keys among those of one axis."""
