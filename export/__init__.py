"""From a training checkpoint to the folder vLLM loads."""
