"""The launcher: torchrun's agent, a rendezvous without pickle, and a restart limit."""
