"""Transformer Engine's own Python under this project's code, on a CPU: what is where stands in README.md."""
