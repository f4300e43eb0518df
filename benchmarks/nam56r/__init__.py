"""NAM56R's published runs on eight H200 and the estimates of their launches."""
