"""The fault zoo: small real training runs, each with one planted fault or none, to see what diagnosis is worth."""
