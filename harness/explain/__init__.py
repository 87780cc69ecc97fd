"""Is a configuration supported? What does it move, and what is legal nearby?"""
