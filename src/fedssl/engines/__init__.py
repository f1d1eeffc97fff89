"""Run clients in this process, or on other machines."""
