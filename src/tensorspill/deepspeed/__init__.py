"""DeepSpeed on this library's engines: its operator interface, its swapper, its writer factory."""
