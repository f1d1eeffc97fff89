"""Clients behind messages."""
