"""Serve many models from one device whose memory cannot hold them all."""
