"""Time of a training step of a framework: the times of kernel classes and transfers on a device, combined by the pipeline.

`workload` defines the inputs, `blocks` counts the work of each kind of block, one module per family of terms computes its time,
`constants` has the fitted numbers, and `predict` adds up the terms. Nothing here imports numpy: the formulas use arithmetic alone, so that
`benchmarks/step_times` evaluates the same functions on arrays with one element per row.
"""
