"""The losses that networks learn from, one file each."""
