"""`python -m gradvitals.cli`, the same as `gradvitals`."""

from gradvitals.cli import main

main()
