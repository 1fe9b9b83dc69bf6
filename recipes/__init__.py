"""Recipes: ordinary Trainer scripts that take a data set, a model and a filter. See README.md."""
