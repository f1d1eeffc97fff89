"""What server and clients tell each other: one file each, both halves."""
