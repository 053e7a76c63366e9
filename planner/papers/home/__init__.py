"""HOME (He et al.): what a fate per tensor costs."""
