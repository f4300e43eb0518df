"""Layout: slots from cuts, pipeline ranks and chunks of slots, mesh coordinates of ranks; owners of blocks outside the layers."""
