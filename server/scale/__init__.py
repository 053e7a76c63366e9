"""Engines placed by Ray Serve: which models each one has, and the ingress that routes requests to them."""
