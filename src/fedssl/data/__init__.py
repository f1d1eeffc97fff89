"""Data sets, partitions, augmentation on the device, and the counter-based random numbers."""
