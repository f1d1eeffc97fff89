"""Use a trained encoder: load it, embed and search images, export it."""
