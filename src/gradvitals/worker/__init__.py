"""The worker: turns the journal of a run into readings, findings and a run file. No torch."""
