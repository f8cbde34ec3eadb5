"""From stored proteins to the batches of a step, by data-parallel rank: one order, whatever the machine."""
