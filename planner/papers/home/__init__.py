"""HOME (He et al.): particle swarm optimisation of a fate per tensor."""
