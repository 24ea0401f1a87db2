"""What a trainer has from a torch optimizer: its groups, its moments, the hooks around its step."""
