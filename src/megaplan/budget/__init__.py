"""Budget: integer bytes `cells[phase][column]` of every distinct rank, the device's reserve, what fits, and what serving would hold."""
