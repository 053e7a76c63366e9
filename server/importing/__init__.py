"""What becomes a repository entry: folders of Hugging Face, modules and checkpoints. Importing runs a model's code."""
