"""Evaluate encoders: one file per protocol, and an evaluator of a run's models."""
