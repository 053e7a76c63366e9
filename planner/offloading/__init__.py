"""Planning with offloaded activations: some leave the workspace while no op uses them, and return."""
