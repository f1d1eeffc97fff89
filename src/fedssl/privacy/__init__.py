"""Limits on what a server learns of its clients: robust and noisy means, secure sums, leaks."""
