"""The PyTorch runtime that trains exactly what a megaplan plan says."""
