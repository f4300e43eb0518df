"""Changes for a spec that does not fit, priced as the command would price them."""
