"""Operating the server: where its settings come from, who may call what, and what can be seen of it."""
