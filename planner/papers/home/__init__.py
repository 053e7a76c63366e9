"""HOME (He et al.): particle swarm optimisation of a choice per tensor."""
