"""Whatever ops read may leave memory: a mode sees each op, and brings in what it reads first."""
