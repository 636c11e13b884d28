"""A run as people read it: verdict, summary, findings and caveats, for the terminal, HTML, notebooks and JSON."""
