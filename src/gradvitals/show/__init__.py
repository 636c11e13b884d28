"""What a run shows, for people: needs the store and no torch."""
