"""One short script per drafting method, and the training loop they share."""
