"""One run: build it, train it, record it."""
