"""Documents to contexts of a decoder: tokenizers, prepared or streamed text, batches."""
