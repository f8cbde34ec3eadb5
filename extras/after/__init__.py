"""What a trained model is used for: inference, downstream evaluation."""
