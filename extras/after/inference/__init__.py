"""What embed.py and score.py do with a trained model."""
