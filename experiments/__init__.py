"""What was measured: a folder for each experiment, run as `python -m experiments.X.Y` in the root of a clone."""
