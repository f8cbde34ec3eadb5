"""What models of every family are built of: attention, alone or shared by ranks, products, stacks, initial weights.

In come tensors and modules, out come tensors and directories of Hugging Face. Knows nothing of losses and data.
"""
