"""Machine topology: reserved for the module that knows which rank sits near which drive.

Nothing is here in this version.
"""
