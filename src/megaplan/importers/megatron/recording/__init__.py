"""A launch script run under observation: stand-ins record what it would launch, and the kernel keeps it in a temporary folder."""
