"""Bytes on disk: model files are read here, checked, and handed on as raw tensors and metadata."""
