"""What becomes a repository entry: Hugging Face models, modules and checkpoints. Importing runs a model's code."""
