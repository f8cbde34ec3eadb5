"""E1: configuration, alphabet, layers, sizes, conversion from and to the names of its authors."""
