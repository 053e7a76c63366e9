"""TENSILE's scheduling of swaps and recomputation, on times that are known beforehand, for one job or several."""
