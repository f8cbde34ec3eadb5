"""What a run will need: memory, a learning rate, a preset of the quickstart."""
