"""What a model knows of biology, beside its loss: contacts of residues. In a training run and after it."""
