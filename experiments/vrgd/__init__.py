"""VRGD against equally tuned baselines, and what it costs."""
