"""Plants faults in small real training runs and counts who finds them."""
