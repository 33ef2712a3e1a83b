"""Activations: saved tensors that go to the drive in forward and come back ahead of backward."""
