"""The cost of the front end: HTTP and gRPC beside tritonserver and beside bare handlers."""
