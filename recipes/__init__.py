"""What a run is made of: recipes, and the strict loader that reads them."""
