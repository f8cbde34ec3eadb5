"""Sets of homologs in one context: which sequences stand together, and attention to those before."""
