"""What a drafter gains: offline in PyTorch, and served in vLLM."""
