"""`python -m gradvitals`, e.g. under torchrun."""

from gradvitals.cli import main

main()
