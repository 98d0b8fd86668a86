"""Plain loops written from the papers, to test against."""
