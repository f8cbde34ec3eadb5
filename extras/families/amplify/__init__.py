"""AMPLIFY: configuration, alphabet, layers, published sizes, conversion from and to the names of its authors."""
