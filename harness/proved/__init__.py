"""Plans that strategies made, proved and remembered."""
