"""Random plans: specs drawn from a seed over every key of the schema, traced, compared with their estimates, and shrunk on a difference."""
