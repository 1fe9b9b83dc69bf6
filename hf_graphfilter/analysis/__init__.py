"""Looking at filters: plots of what was learned."""
