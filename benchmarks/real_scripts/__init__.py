"""Public scripts and small ones in the manner of each framework, bare and under `gradvitals run`."""
