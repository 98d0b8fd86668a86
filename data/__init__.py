"""From conversations to batches of tokens, loss masks and teacher features."""
