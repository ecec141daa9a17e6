"""Several algorithms or settings side by side: a grid of runs, their statistics, tables, plots and one page."""
