"""Llama, Mistral, Mixtral: from tokens to logits and loss sums; flags, published sizes, Hugging Face's form.

`model.layers` is what strategies wrap. Knows nothing of data, parallelism, checkpoints and ESM-2.
"""
