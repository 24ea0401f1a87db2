"""What `train_step.py` times, on what, and how it is reported."""
