"""The Triton kernels that a plan launches: found on fake tensors, and compiled before they are launched, without a GPU."""
