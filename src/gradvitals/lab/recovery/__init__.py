"""What keeps a run alive: planted accidents, and who gets over them."""
