"""The launcher of ranks: torchrun's agent with a rendezvous without pickle, and limits on restarts."""
