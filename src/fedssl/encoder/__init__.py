"""Use a trained encoder."""
