"""gradvitals in the loops people have: Lightning, transformers, Accelerate, and scripts that know nothing of it.

Each file imports its framework when it is imported itself, and nothing else of gradvitals imports them.
"""
