"""Sizes of models' memory: their demands, latency curves of quick plans, and the final plans of all buckets."""
