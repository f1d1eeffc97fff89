"""Where client work happens."""
