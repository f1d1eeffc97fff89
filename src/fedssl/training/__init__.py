"""One network and its training step."""
