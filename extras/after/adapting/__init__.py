"""A trained model, adapted to a family of proteins or to one of them."""
