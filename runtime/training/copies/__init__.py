"""Copies between memory and where evicted bytes go: threads, streams and stores."""
