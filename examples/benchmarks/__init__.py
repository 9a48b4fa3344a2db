"""Measurements: each script writes its raw results as JSON, from which the README's tables are made."""
