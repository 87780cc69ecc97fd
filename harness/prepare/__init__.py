"""Plans that cells run and are priced by: of both directions, and plans that can be scaled."""
