"""Records and reports of a run: metrics, samples, progress on the terminal, plots, report."""
