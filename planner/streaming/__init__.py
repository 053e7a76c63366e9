"""The searcher `streaming`: initial choices of residents, a linear relaxation, and simulated annealing."""
