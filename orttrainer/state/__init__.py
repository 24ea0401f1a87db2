"""The tensors that a trainer shares with the module, and what belongs to them."""
