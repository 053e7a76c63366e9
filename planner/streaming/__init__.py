"""The searcher `streaming`: quick choices of residents, the linear relaxation, simulated annealing."""
