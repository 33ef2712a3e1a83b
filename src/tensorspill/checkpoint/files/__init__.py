"""The files of a checkpoint: format, manifest, streaming writes and reads, commit."""
