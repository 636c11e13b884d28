"""Which tensors can adapt their scale under weight decay, what tells beforehand, and whether multipliers help."""
