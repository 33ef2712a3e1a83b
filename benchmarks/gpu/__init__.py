"""What `benchmarks.gpu_check` does: parts that are each tried by themselves, in a few minutes."""
