"""The time of a training step: what each kernel class and each transfer takes on a device under a framework, put together by the pipeline.

`workload` says what is timed, `blocks` counts the work of each kind of block, one module a term family prices it, `constants` names the
fitted numbers, and `predict` puts the terms together. Nothing here imports numpy: the formulas use arithmetic alone, so that
`benchmarks/step_times` evaluates the same functions on arrays of rows.
"""
