"""Run cells on real ranks and time them."""
