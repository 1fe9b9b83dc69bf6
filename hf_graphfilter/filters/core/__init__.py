"""What filters are made of: their base classes, the registry, and how they are built and read."""
