"""GPUDirect Storage: reserved for the engine that moves bytes straight between drive and GPU.

Nothing is here in this version; ``open_engine(backend="gds")`` says so.
"""
