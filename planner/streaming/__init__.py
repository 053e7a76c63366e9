"""The searcher `streaming`: initial choices of residents, the linear relaxation, simulated annealing."""
