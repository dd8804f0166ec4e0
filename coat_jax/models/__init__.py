"""Readable reference models, one file each; their layers are injected, never copied."""
