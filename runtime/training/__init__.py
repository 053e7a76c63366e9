"""A user's training loop under a byte budget: eager ops, whose storages leave memory and come back."""
