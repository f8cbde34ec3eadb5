"""Embeddings looked at: map.py's projections, neighbours, clusters, picture and page."""
