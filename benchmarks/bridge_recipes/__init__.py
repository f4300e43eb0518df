"""Published recipes of Megatron-Bridge as specs."""
