"""Measurements: each script writes its raw results as JSON, from which the tables of measurements are made."""
