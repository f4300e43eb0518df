"""What to change where a spec does not fit: changes that were priced as the command would price them."""
