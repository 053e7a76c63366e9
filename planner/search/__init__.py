"""The search driver, the base class of searchers, and the portfolio that combines them."""
