"""NAM56R's published runs on eight H200 beside the estimates of their launches."""
