"""Proves that a model trains on a mesh as on one device. Used by recipes.prove, and by the tests."""
