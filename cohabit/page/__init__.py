"""One self-contained HTML page for reports and for a running server. Imports nothing else of Cohabit."""
