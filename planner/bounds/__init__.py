"""What no plan can be faster than."""
