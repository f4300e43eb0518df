"""The page that sets what a GPU measured beside the estimate and the model of the same plan."""
