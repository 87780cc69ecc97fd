"""Plans on tensors: kernels, transports, and the interpreter that runs them."""
