"""What was measured on a GPU beside what the model says."""
