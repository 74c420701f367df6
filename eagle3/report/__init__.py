"""The report of a run: one HTML file, whatever stage the run has come to."""
