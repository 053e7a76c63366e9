"""The search driver, the base class of every searcher, and the portfolio that combines them."""
