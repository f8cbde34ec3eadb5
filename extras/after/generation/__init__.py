"""What generate.py does: text and proteins from decoders, proteins from encoders."""
