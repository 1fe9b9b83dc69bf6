"""The parts that filters are made of: base classes, the registry, and how filters are built and read."""
