"""Where a run's figures and its model go: trackers, the Hub."""
