"""Several ranks: who holds what, how their numbers are added up, and whether they agree."""
