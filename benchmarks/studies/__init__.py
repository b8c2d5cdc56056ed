"""The comparisons of the papers, made again: one page beside each."""
