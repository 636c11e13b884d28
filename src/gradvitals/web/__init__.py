"""The live page: `gradvitals serve`."""
