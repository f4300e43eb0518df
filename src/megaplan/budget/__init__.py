"""Budget: integer bytes `cells[phase][column]` of every distinct rank, the device's reserve, whether it fits, and memory of serving."""
