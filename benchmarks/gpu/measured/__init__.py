"""The page that compares a GPU's measurements with the estimate and the step-time model of the same plan."""
