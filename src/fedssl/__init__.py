"""Federated self-supervised learning of image encoders."""

__version__ = "0.1.0"
