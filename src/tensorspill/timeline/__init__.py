"""What a step was made of: compute, transfer and stall, as frozen records."""
