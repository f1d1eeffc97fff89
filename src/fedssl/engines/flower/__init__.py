"""Flower carries the messages."""
