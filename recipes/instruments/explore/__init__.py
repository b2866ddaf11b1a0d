"""The page that shows what a strategy does to every array."""
