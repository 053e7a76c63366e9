"""The genetic search for served models: orders of ops and streaming decisions evolve; short walks mutate them."""
