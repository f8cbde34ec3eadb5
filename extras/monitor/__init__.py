"""While a run trains: detection of hangs, of stragglers and of replicas that differ."""
