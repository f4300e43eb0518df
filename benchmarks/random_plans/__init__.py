"""Random plans: specs drawn from a seed over every key of the schema, traced beside their estimates, shrunk where the two differ."""
