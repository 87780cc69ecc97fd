"""From a strategy's name and a problem to proved plans, kept for reuse."""
