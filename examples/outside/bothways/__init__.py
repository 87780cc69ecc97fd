"""An example of a package from outside: a ring that turns both ways, and a pattern."""
