"""The search driver, the protocol that every searcher follows, and the portfolio that combines them."""
