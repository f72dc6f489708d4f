"""Ready-made processors for the usual stateful jobs, declared by class attributes."""
