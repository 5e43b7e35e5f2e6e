"""Measurements, each printing the bar of the design beside what it found. `main(argv)` returns the exit code."""
