"""Llama, Mistral and Mixtral: configuration, layers, conversion, flags and the causal language modelling task."""
