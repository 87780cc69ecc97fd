"""A model's training step: memory, longest context, seconds."""
