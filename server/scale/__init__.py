"""Engines placed by Ray Serve: their models, and the ingress that routes requests to them."""
