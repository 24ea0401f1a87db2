"""What torch's exporters write down in a way that is wrong, or that ONNX Runtime lacks, in nodes that are right: one file a kind."""
