"""Planning with offloaded activations: some leave the workspace between two uses and return."""
