"""What a forward keeps from call to call: what a graph has as its state, and what no graph can keep."""
