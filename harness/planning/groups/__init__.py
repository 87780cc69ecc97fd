"""Groups of ranks that share documents: values, the solver, Megatron's rule."""
