"""Dense attention in float64, inputs, and the one tolerance."""
