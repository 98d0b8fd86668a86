"""One file per drafting method: its network, its loss, its plain reference decode."""
