"""The demonstration: training a model whose parameters live on the drive."""
