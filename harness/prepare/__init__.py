"""What cells run and are priced by: plans of both directions, and plans that can be scaled."""
