"""The exported graph against the module that it came from: what PyTorch gives, what differs, and why."""
