"""Small helpers that know nothing of training."""
