"""`gradvitals run`: a script that knows nothing of gradvitals, run as Python would run it, and watched."""
