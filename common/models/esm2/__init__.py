"""ESM-2: configuration, layers, losses, published sizes, conversion to and from Hugging Face's form."""
