"""The doctor: what this machine can do, layer by layer, with evidence and remedies."""
