"""Layout: cuts to slots, slots to pipeline ranks and chunks, ranks to mesh coordinates; who owns what outside the layers."""
