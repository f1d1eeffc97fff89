"""Encoders, heads and norms."""
