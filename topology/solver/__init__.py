"""The planner's solver: the least time in which groups of bytes can be written, and who writes."""
