"""ESM-2: from tokens to logits and loss sums; its flags, published sizes, weights in and out of Hugging Face's form.

`model.layers` is what strategies wrap. Knows nothing of data, parallelism and checkpoints.
"""
