"""Networks: T5, decoder-only models, and toys."""
