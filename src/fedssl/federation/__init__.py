"""What algorithms are written in: server, clients, cohort."""
