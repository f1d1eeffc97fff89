"""Server, clients and cohort: the language that algorithms are written in."""
