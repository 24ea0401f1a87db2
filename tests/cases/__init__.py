"""One use of every operator with a rule, by family: each module here has a list `CASES`."""
