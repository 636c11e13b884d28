"""Which tensors adapt their scale under weight decay, and what helps those that do not."""
