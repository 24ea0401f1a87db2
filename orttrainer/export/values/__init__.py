"""Numbers, truths and sizes that only a batch tells, and what forward decides by them."""
