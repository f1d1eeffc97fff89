"""What a network learns from: one file each."""
