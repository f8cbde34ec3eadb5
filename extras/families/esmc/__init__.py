"""ESM C: configuration, layers, published sizes, conversion to and from transformers' `EsmcForMaskedLM`."""
