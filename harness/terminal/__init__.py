"""What every verb shares at the terminal: its arguments and their help, tables and progress."""
