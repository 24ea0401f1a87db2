"""The one engine behind all front ends: the step, the graph that trains at the moment, and how another takes its place."""
