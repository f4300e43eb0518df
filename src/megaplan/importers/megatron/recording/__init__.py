"""A launch script run under observation: stubs record what it would launch, and the kernel keeps it in a temporary folder."""
