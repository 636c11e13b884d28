"""Plants faults on one of several ranks, and measures what watching costs them."""
