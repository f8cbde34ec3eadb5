"""Statistics of quantised tensors (--quant_stats): what is recorded, its file, and a report of it."""
