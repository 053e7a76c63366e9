"""What sizing and fitting ask: models' demands, curves of quick plans, and the final plans of all buckets."""
