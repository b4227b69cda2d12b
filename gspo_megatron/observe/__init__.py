"""What a run leaves behind: metrics, samples, progress on the terminal, plots, report."""
