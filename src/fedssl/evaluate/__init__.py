"""Evaluate encoders: a file a protocol, and an evaluator of a run's models."""
