"""Paired measurement: whether speculation pays on this machine, and the artifact that shows it."""
