"""A model on the assays of ProteinGym: scores, metrics, and their averages as its authors make them."""
