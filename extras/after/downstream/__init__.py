"""What a model knows of biology, beside its loss: contacts, mutations, labels. In a training run and after it."""
