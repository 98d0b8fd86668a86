"""What only the tests of vLLM's CPU build need."""
