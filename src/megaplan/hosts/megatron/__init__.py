"""Megatron-Core: what its last pipeline rank allocates, tensor by tensor."""
