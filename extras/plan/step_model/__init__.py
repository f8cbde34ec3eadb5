"""A model of a training step's time on GPUs: counted work, a roofline, communication."""
