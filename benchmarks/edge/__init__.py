"""Models on small devices: in little memory, with parameters on flash, one core, or a medium that fails."""
