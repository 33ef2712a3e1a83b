"""Writers: which ranks write which bytes of a checkpoint, planned against the hardware."""
