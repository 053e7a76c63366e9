"""HOME (He et al.): particle swarm optimisation of one choice per tensor."""
