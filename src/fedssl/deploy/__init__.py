"""Run on real sites."""
