"""Reports of a run: the records of metrics.jsonl, TensorBoard, the terminal display, memory and FLOPs utilisation."""
